"""Multi-head attention (section 3.2.2) and the cache that decoding keeps of its keys and values."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.attention.kernels import attend
from transformer_jax.config import ModelConfig
from transformer_jax.dropout import dropout
from transformer_jax.types import Key


class KVCache(NamedTuple):
    """Keys and values of positions already seen."""

    key: Float[Array, "B N S H"]
    value: Float[Array, "B N S H"]

    def put(self, new: KVCache, index: Int[Array, ""]) -> KVCache:
        """The cache with the `new` positions written from `index` on."""
        return KVCache(
            *(
                jax.lax.dynamic_update_slice_in_dim(old, more.astype(old.dtype), index, axis=2)
                for old, more in zip(self, new, strict=True)
            )
        )


class MultiHeadAttention(nn.Module):
    """Projects to heads, attends in each, and projects their concatenation back."""

    config: ModelConfig

    def setup(self) -> None:
        config = self.config
        heads = (config.heads, config.d_model // config.heads)
        dense = {"use_bias": config.bias, "dtype": jnp.dtype(config.dtype)}
        init = nn.initializers.xavier_uniform()
        self.query = nn.DenseGeneral(heads, kernel_init=init, **dense)
        self.key = nn.DenseGeneral(heads, kernel_init=init, **dense)
        self.value = nn.DenseGeneral(heads, kernel_init=init, **dense)
        self.out = nn.DenseGeneral(config.d_model, axis=(-2, -1), kernel_init=init, **dense)

    def project(self, x: Float[Array, "B S D"]) -> KVCache:
        """Keys and values of `x`, each [B, N, S, H]."""
        return KVCache(self.key(x).swapaxes(1, 2), self.value(x).swapaxes(1, 2))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: KVCache,
        mask: Bool[Array, "#B #N #T S"] | None,
        key: Key | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T S"] | None]:
        """The attended [B, T, D], and the weights. `key`: dropout on the weights; None: none."""
        rate = self.config.attention_dropout
        drop = None if key is None or rate == 0 else lambda weights: dropout(weights, rate, key)
        query = self.query(x).swapaxes(1, 2)
        attended, weights = attend(query, memory.key, memory.value, mask, dropout=drop)
        return self.out(attended.swapaxes(1, 2)), weights
