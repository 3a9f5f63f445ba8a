"""Multi-head attention (section 3.2.2), and the cache of keys and values for decoding."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.attention.kernels import Kernel, attend, has_weights
from transformer_jax.attention.layer_kinds import (
    AttentionInputs,
    AttentionOutput,
    KindParameters,
    find_kind,
)
from transformer_jax.attention.masks import Mask
from transformer_jax.attention.positions import rotate
from transformer_jax.config import AttentionConfig, ModelConfig
from transformer_jax.dense import dense
from transformer_jax.dropout import dropout
from transformer_jax.errors import UserError
from transformer_jax.types import Auxiliary, Constrain, Key, Size, unconstrained

Positions = Int[Array, "#B T"]
HEADS = ("batch", "heads", "length", None)
"""Logical names of the dimensions of queries, keys and values."""


class KeysValues(NamedTuple):
    """Keys and values that queries attend to."""

    key: Float[Array, "B G S H"]
    value: Float[Array, "B G S H"]


class KVCache(NamedTuple):
    """Keys and values as decoding keeps them.

    Positions are the last dimension of the keys. On a CPU, a step's product with them then takes
    less than half of the time, since it need not transpose them.
    """

    key: Float[Array, "B G H S"]
    value: Float[Array, "B G S H"]

    @classmethod
    def of(cls, memory: KeysValues) -> KVCache:
        """Returns the cache of given keys and values."""
        return cls(memory.key.swapaxes(2, 3), memory.value)

    def read(self) -> KeysValues:
        """Returns all keys and values."""
        return KeysValues(self.key.swapaxes(2, 3), self.value)

    def write(self, new: KeysValues, index: Int[Array, ""]) -> KVCache:
        """Returns the cache with `new` written to the positions from `index` on."""
        key, value = KVCache.of(new)
        update = jax.lax.dynamic_update_slice_in_dim
        return KVCache(
            update(self.key, key.astype(self.key.dtype), index, axis=3),
            update(self.value, value.astype(self.value.dtype), index, axis=2),
        )

    def grown(self, length: Size) -> KVCache:
        """Returns the cache, padded to `length` positions."""
        more = length - self.value.shape[2]
        none = (0, 0)
        return KVCache(
            jnp.pad(self.key, (none, none, none, (0, more))),
            jnp.pad(self.value, (none, none, (0, more), none)),
        )


class MultiHeadAttention(nn.Module):
    """Projects to heads, attends in each of them, and projects their concatenation back.

    `role` is the config field that sets the kind of attention. It has the same kind in all layers,
    or in this one alone.
    """

    config: ModelConfig
    role: str
    kernel: str | Kernel = "auto"
    constrain: Constrain = unconstrained

    def setup(self) -> None:
        config = self.config
        self.attention: AttentionConfig = getattr(config, self.role)
        self.kind = find_kind(self.role, self.attention.kind)
        # Stored runs have this attribute's name in the paths of its parameters.
        self.weighing = KindParameters(self.kind.compute)
        if self.kind.projections:
            shared = (config.kv_heads or config.heads, config.head_size)
            self.query = dense(config, (config.heads, config.head_size))
            self.key = dense(config, shared)
            self.value = dense(config, shared)
            self.out = dense(config, config.d_model, axis=(-2, -1))

    def init_cache(self, sentences: Size, length: Size) -> KVCache:
        """Returns an empty cache of `length` positions."""
        config = self.config
        shared = config.kv_heads if self.kind.projections else None
        shape = (sentences, shared or config.heads, length, config.head_size)
        empty = jnp.zeros(shape, jnp.dtype(config.dtype))
        return KVCache.of(KeysValues(empty, empty))

    def project(self, x: Float[Array, "B S D"], positions: Positions | None = None) -> KeysValues:
        """Returns the keys and values of `x`, each [B, G, S, H]; `positions` rotate the keys."""
        if not self.kind.projections:
            heads = self._split_heads(x)
            return KeysValues(heads, heads)
        key, value = self.key(x).swapaxes(1, 2), self.value(x).swapaxes(1, 2)
        key = self._rotated(key, positions)
        return KeysValues(self.constrain(key, HEADS), self.constrain(value, HEADS))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: KeysValues,
        mask: Mask,
        key: Key | None = None,
        *,
        bias: Float[Array, "#B #N #T S"] | None = None,
        positions: Positions | None = None,
    ) -> tuple[Float[Array, "B T D"], Auxiliary]:
        """Returns the output [B, T, D] and the auxiliary values of the kind of attention.

        `key` is the rng of attention dropout and of sampled choices; None: evaluation.
        """
        query = self._query(x, positions)
        rate = self.config.attention_dropout
        drop = None if key is None or rate == 0 else partial(dropout, rate=rate, key=key)
        inputs = AttentionInputs(
            query=query,
            key=memory.key,
            value=memory.value,
            mask=mask,
            bias=bias,
            config=self.attention,
            max_length=self.config.max_length,
            rng=None if key is None else jax.random.fold_in(key, 1),
            attend=partial(attend, bias=bias, kernel=self.kernel, dropout=drop),
            needs_weights=has_weights(self.kernel),
            last_layer=self.attention.layer in (None, self.config.depth_of(self.role) - 1),
        )
        output = self._checked(self.weighing(inputs), query)
        joined = self.constrain(output.context, HEADS).swapaxes(1, 2)
        attended = self.out(joined) if self.kind.projections else joined.reshape(x.shape)
        return attended, self._named(output)

    def _query(self, x: Float[Array, "B T D"], positions: Positions | None) -> Array:
        if not self.kind.projections:
            return self._split_heads(x)
        query = self._rotated(self.query(x).swapaxes(1, 2), positions)
        return self.constrain(query, HEADS)

    def _checked(self, output: Any, query: Array) -> AttentionOutput:
        """Returns `output`. UserError: a user's kind has returned something else."""
        context = getattr(output, "context", output)
        if not isinstance(output, AttentionOutput) or context.shape != query.shape:
            found = f"{type(output).__name__} of {getattr(context, 'shape', 'no shape')}"
            raise UserError(
                f"model.{self.role}.kind={self.attention.kind!r}: must return an AttentionOutput "
                f"with a context of {query.shape}, not {found}"
            )
        return output

    def _named(self, output: AttentionOutput) -> Auxiliary:
        """Returns the kind's auxiliary values under the name of this sub-layer."""
        name = self.name or self.role
        weights = {} if output.weights is None else {name: output.weights}
        losses = {f"{name}/{key}": loss for key, loss in output.losses.items()}
        metrics = {f"{name}/{key}": metric for key, metric in output.metrics.items()}
        return Auxiliary(losses, metrics, weights)

    def _rotated(
        self, x: Float[Array, "B N T H"], positions: Positions | None
    ) -> Float[Array, "B N T H"]:
        if positions is None or self.config.positions != "rotary":
            return x
        return rotate(x, positions)

    def _split_heads(self, x: Float[Array, "B T D"]) -> Float[Array, "B N T H"]:
        heads = (self.config.heads, self.config.head_size)
        return x.reshape(*x.shape[:2], *heads).swapaxes(1, 2)
