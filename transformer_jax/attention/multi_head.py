"""Multi-head attention (section 3.2.2), and the cache of keys and values for decoding."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.attention.kernels import AnyKernel, attend, has_weights
from transformer_jax.attention.kinds import AttentionInputs, AttentionOutput, find_kind
from transformer_jax.attention.masks import Mask
from transformer_jax.attention.positions import rotate
from transformer_jax.config import AttentionConfig, ModelConfig
from transformer_jax.dense import dense
from transformer_jax.dropout import dropout
from transformer_jax.errors import UserError
from transformer_jax.types import (
    Auxiliary,
    Constrain,
    Heads,
    Hidden,
    Key,
    KVHeads,
    LayerState,
    Size,
    unconstrained,
)

HEADS = ("batch", "heads", "length", None)
"""Logical names of the dimensions of queries, keys and values."""


class Context(NamedTuple):
    """What a layer gets besides the hidden states; in decoding, the same at each position.

    In training, the hidden states are [B, T, D]. In a decode step, they are [B, K, D]: the K
    hypotheses of a sentence are the queries, and the keys are those of all K at T positions.
    """

    mask: Mask
    positions: Int[Array, "#B T"] | None = None  # of the queries; None: not rotated
    bias: Float[Array, "#B #N #T S"] | None = None  # added to the scores
    position: Int[Array, ""] | None = None  # that of a decode step; None: training


class KeysValues(NamedTuple):
    """Keys and values that queries attend to."""

    key: KVHeads
    value: KVHeads


class KVCache(NamedTuple):
    """Keys and values as decoding keeps them: those of K hypotheses at each of T positions.

    They are S = T · K, position by position; the cache of the encoder's memory has K = 1. Positions
    are the last dimension of the keys: on a CPU, a step's matmul with them then takes less than
    half of the time, since it need not transpose them. With dimensions for T and K of their own,
    XLA would copy the cache in each step.
    """

    key: Float[Array, "B G H S"]
    value: Float[Array, "B G S H"]

    @classmethod
    def of_memory(cls, memory: KeysValues) -> KVCache:
        """Returns the cache of given keys and values."""
        return cls(memory.key.swapaxes(2, 3), memory.value)

    def read(self) -> KeysValues:
        """Returns all keys and values."""
        return KeysValues(self.key.swapaxes(2, 3), self.value)

    def write(self, new: KeysValues, index: Int[Array, ""]) -> KVCache:
        """Returns the cache with the keys and values of K hypotheses at position `index`."""
        start, update = index * new.value.shape[2], jax.lax.dynamic_update_slice_in_dim
        key = new.key.swapaxes(2, 3).astype(self.key.dtype)
        key = update(self.key, key, start, axis=3)
        value = update(self.value, new.value.astype(self.value.dtype), start, axis=2)
        return KVCache(key, value)


class MultiHeadAttention(nn.Module):
    """Projects to heads, attends in each of them, and projects their concatenation back.

    `role` is the config field that sets the kind of attention. It has the same kind in all layers,
    or in this one alone. As self-attention of the decoder, it is an entry of `SELF_LAYERS`.
    """

    config: ModelConfig
    role: str
    kernel: AnyKernel = "auto"
    constrain: Constrain = unconstrained

    def setup(self) -> None:
        config = self.config
        self.attention: AttentionConfig = getattr(config, self.role)
        self.kind = find_kind(self.role, self.attention.kind)
        self.query = self.key = self.value = None
        if self.kind.projections:
            shared = (config.kv_heads or config.heads, config.head_size)
            self.query = dense(config, (config.heads, config.head_size))
            self.key = dense(config, shared)
            self.value = dense(config, shared)
            self.out = dense(config, config.d_model, axis=(-2, -1))

    def project(
        self, x: Float[Array, "B S D"], positions: Int[Array, "#B S"] | None = None
    ) -> KeysValues:
        """Returns the keys and values of `x`; `positions` rotate the keys."""
        return KeysValues(self._heads(self.key, x, positions), self._heads(self.value, x))

    def _heads(
        self,
        projection: nn.DenseGeneral | None,
        x: Hidden,
        positions: Int[Array, "#B T"] | None = None,
    ) -> Heads:
        """Returns the heads of `x`, projected if the kind has projections; `positions` rotate
        them."""
        if projection is None:
            return x.reshape(*x.shape[:2], self.config.heads, -1).swapaxes(1, 2)
        heads = projection(x).swapaxes(1, 2)
        if positions is not None and self.config.positions == "rotary":
            heads = rotate(heads, positions, self.config.max_length)
        return self.constrain(heads, HEADS)

    @nn.compact  # for the parameters of kinds
    def __call__(
        self,
        x: Hidden,
        context: Context,
        rng: Key | None = None,
        keys_values: KeysValues | None = None,
    ) -> tuple[Hidden, Auxiliary]:
        """Returns the output and the auxiliary values of the kind of attention.

        rng: of attention dropout and of sampled choices; None: evaluation. keys_values: what `x`
        attends to; None: itself.
        """
        if keys_values is None:
            keys_values = self.project(x, context.positions)
        query = self._heads(self.query, x, context.positions)
        rate = self.config.attention_dropout
        drop = None if rng is None or rate == 0 else partial(dropout, rate=rate, key=rng)
        inputs = AttentionInputs(
            query=query,
            key=keys_values.key,
            value=keys_values.value,
            mask=context.mask,
            bias=context.bias,
            config=self.attention,
            max_length=self.config.max_length,
            rng=None if rng is None else jax.random.fold_in(rng, 1),
            attend=partial(attend, bias=context.bias, kernel=self.kernel, dropout=drop),
            needs_weights=has_weights(self.kernel),
            last_layer=self.attention.layer in (None, self.config.depth_of(self.role) - 1),
            param=self.param,
        )
        output = self._checked(self.kind.compute(inputs), query)
        joined = self.constrain(output.context, HEADS).swapaxes(1, 2)
        y = self.out(joined) if self.kind.projections else joined.reshape(x.shape)
        name = self.name or self.role
        weights = {} if output.weights is None else {name: output.weights}
        auxiliary = Auxiliary(dict(output.losses), dict(output.metrics), {}).within(name)
        return y, auxiliary._replace(weights=weights)

    def init_state(self, sentences: Size, beams: int, length: Size) -> LayerState:
        """Returns an empty cache of `length` positions."""
        config = self.config
        shared = config.kv_heads if self.kind.projections else None
        shape = (sentences, shared or config.heads, length * beams, config.head_size)
        empty = jnp.zeros(shape, jnp.dtype(config.dtype))
        return LayerState(KVCache.of_memory(KeysValues(empty, empty)), ())

    def step(
        self, x: Float[Array, "B K D"], state: LayerState, context: Context
    ) -> tuple[Float[Array, "B K D"], LayerState, Auxiliary]:
        """Returns the output for K hypotheses, the state with their keys and values, and the
        auxiliary values."""
        assert context.position is not None
        cache = state.cache.write(self.project(x, context.positions), context.position)
        y, auxiliary = self(x, context, None, cache.read())
        return y, LayerState(cache, ()), auxiliary

    @staticmethod
    def grow(state: LayerState, beams: int, length: int) -> LayerState:
        """Returns the state, padded to `length` positions."""
        key, value = state.cache
        more = length * beams - value.shape[2]
        key = jnp.pad(key, ((0, 0), (0, 0), (0, 0), (0, more)))
        value = jnp.pad(value, ((0, 0), (0, 0), (0, more), (0, 0)))
        return LayerState(KVCache(key, value), ())

    def _checked(self, output: Any, query: Array) -> AttentionOutput:
        """Returns `output`. UserError: a user's kind has returned something else."""
        context = getattr(output, "context", output)
        if not isinstance(output, AttentionOutput) or context.shape != query.shape:
            returned = f"{type(output).__name__} of {getattr(context, 'shape', 'no shape')}"
            raise UserError(
                f"model.{self.role}.kind={self.attention.kind!r}: must return an AttentionOutput "
                f"with a context of {query.shape}, not {returned}"
            )
        return output
