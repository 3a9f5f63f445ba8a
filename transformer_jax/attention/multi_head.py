"""Multi-head attention (section 3.2.2) and the cache that decoding keeps of its keys and values."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.attention.kernels import Kernel, attend
from transformer_jax.attention.layer_kinds import Attended, Given, Weighing, find_kind
from transformer_jax.attention.masks import Mask
from transformer_jax.attention.positions import rotate
from transformer_jax.config import AttentionConfig, ModelConfig
from transformer_jax.dropout import dropout
from transformer_jax.types import Key

Positions = Int[Array, "#B T"]


class KVCache(NamedTuple):
    """Keys and values of positions already seen."""

    key: Float[Array, "B G S H"]
    value: Float[Array, "B G S H"]

    def put(self, new: KVCache, index: Int[Array, ""]) -> KVCache:
        """The cache with the `new` positions written from `index` on."""
        return KVCache(
            *(
                jax.lax.dynamic_update_slice_in_dim(old, more.astype(old.dtype), index, axis=2)
                for old, more in zip(self, new, strict=True)
            )
        )


class MultiHeadAttention(nn.Module):
    """Projects to heads, attends in each, and projects their concatenation back.

    `place` is the config's field that says which kind of attention it is, `layer` its number.
    """

    config: ModelConfig
    place: str
    layer: int = 0
    kernel: str | Kernel = "auto"

    def setup(self) -> None:
        config = self.config
        chosen: AttentionConfig = getattr(config, self.place)
        self.attention = chosen.of_layer(self.layer)
        self.weighing = Weighing(find_kind(self.place, self.attention.kind))
        if self.attention.kind == "plain":
            return
        heads = (config.heads, config.head_size)
        shared = (config.kv_heads or config.heads, config.head_size)
        dense = {"use_bias": config.bias, "dtype": jnp.dtype(config.dtype)}
        init = nn.initializers.xavier_uniform()
        self.query = nn.DenseGeneral(heads, kernel_init=init, **dense)
        self.key = nn.DenseGeneral(shared, kernel_init=init, **dense)
        self.value = nn.DenseGeneral(shared, kernel_init=init, **dense)
        self.out = nn.DenseGeneral(config.d_model, axis=(-2, -1), kernel_init=init, **dense)

    def project(self, x: Float[Array, "B S D"], positions: Positions | None = None) -> KVCache:
        """Keys and values of `x`, each [B, G, S, H]; `positions`: of rotary self-attention."""
        if self.attention.kind == "plain":
            heads = self._split(x)
            return KVCache(heads, heads)
        key, value = self.key(x).swapaxes(1, 2), self.value(x).swapaxes(1, 2)
        return KVCache(self._turn(key, positions), value)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: KVCache,
        mask: Mask,
        key: Key | None = None,
        *,
        bias: Float[Array, "#B N #T S"] | None = None,
        positions: Positions | None = None,
    ) -> tuple[Float[Array, "B T D"], Attended]:
        """The attended [B, T, D], and what the kind of attention gave back.

        `key`: of dropout on the weights and of sampled choices; None: evaluation.
        """
        plain = self.attention.kind == "plain"
        query = self._split(x) if plain else self._turn(self.query(x).swapaxes(1, 2), positions)
        rate = self.config.attention_dropout
        drop = None if key is None or rate == 0 else partial(dropout, rate=rate, key=key)
        given = Given(
            query=query * query.shape[-1] ** 0.5 if plain else query,
            key=memory.key,
            value=memory.value,
            mask=mask,
            bias=bias,
            config=self.attention,
            max_length=self.config.max_length,
            random=None if key is None else jax.random.fold_in(key, 1),
            attend=partial(attend, bias=bias, kernel=self.kernel, dropout=drop),
            weights=self.kernel == "reference",
        )
        attended: Attended = self.weighing(given)
        context: Any = getattr(attended, "context", attended)
        if not isinstance(attended, Attended) or context.shape != query.shape:
            found = f"{type(attended).__name__} of {getattr(context, 'shape', 'no shape')}"
            raise ValueError(
                f"model.{self.place}.kind={self.attention.kind!r}: must return an Attended with a "
                f"context of {query.shape}, not {found}"
            )
        joined = attended.context.swapaxes(1, 2)
        return joined.reshape(x.shape) if plain else self.out(joined), attended

    def _turn(
        self, x: Float[Array, "B N T H"], positions: Positions | None
    ) -> Float[Array, "B N T H"]:
        if positions is None or self.config.positions != "rotary":
            return x
        return rotate(x, positions)

    def _split(self, x: Float[Array, "B T D"]) -> Float[Array, "B N T H"]:
        heads = (self.config.heads, self.config.head_size)
        return x.reshape(*x.shape[:2], *heads).swapaxes(1, 2)
