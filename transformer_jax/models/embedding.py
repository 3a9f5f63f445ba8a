"""Embeds ids: scaled embeddings plus positions (sections 3.4 and 3.5)."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.attention.positions import position_table
from transformer_jax.config import ModelConfig
from transformer_jax.dense import multiply
from transformer_jax.dropout import dropout
from transformer_jax.errors import UserError
from transformer_jax.special_ids import PAD
from transformer_jax.types import Constrain, Hidden, Key, unconstrained


class Embedding(nn.Module):
    """Maps ids to vectors: scaled embedding plus position (sections 3.4 and 3.5).

    shards: as in `Model`. With more than one, each shard of the rows uses its own copy of the
    embeddings. The gradients of all uses of a copy are then summed before devices exchange them.
    """

    config: ModelConfig
    vocabulary: int
    constrain: Constrain = unconstrained
    shards: int = 1

    def setup(self) -> None:
        config = self.config
        width = config.d_model
        normal = nn.initializers.normal(width**-0.5)
        embedding = self.param("embedding", normal, (self.vocabulary, width))
        # Whole vectors on each device: they are looked up for the device's own sentences.
        self.embedding = self.constrain(jnp.asarray(embedding), ("vocabulary", None))
        if self.shards > 1:
            copies = jnp.broadcast_to(self.embedding, (self.shards, *embedding.shape))
            self.copies = self.constrain(copies, ("batch", "vocabulary", None))
        # Other positions than these are applied in self-attention, or not at all.
        self.table = position_table(config) if config.positions == "sinusoidal" else None
        if config.positions == "learned":
            shape = (config.max_length, width)
            self.table = self.param("positions", nn.initializers.normal(0.02), shape)

    def __call__(
        self, ids: Int[Array, "B T"], positions: Int[Array, "#B T"] | None, rng: Key | None
    ) -> Hidden:
        """Returns the embedded `ids`; `positions` None: each row is one sentence."""
        config = self.config
        if positions is None:
            check_length(config, ids.shape[1])
            positions = jnp.arange(ids.shape[1])[None, :]
        dtype = jnp.dtype(config.dtype)
        scale = config.d_model**0.5 if config.embedding_scale is None else config.embedding_scale
        x = self._look_up(ids, dtype) * jnp.asarray(scale, dtype)
        if config.decoder_start_id is None:
            x = jnp.where((ids == PAD)[..., None], jnp.zeros((), dtype), x)
        if self.table is not None:
            x = x + jnp.asarray(self.table, dtype)[positions]
        return dropout(self.constrain(x, ("batch", "length", None)), config.dropout, rng)

    def logits(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Returns the dot products with all embeddings in float32 (section 3.4)."""
        if self.shards == 1:
            return project(x, self.embedding)
        split = x.reshape(self.shards, -1, *x.shape[1:])
        return jax.vmap(project)(split, self.copies).reshape(*x.shape[:-1], -1)

    def _look_up(self, ids: Int[Array, "B T"], dtype: Any) -> Hidden:
        if self.shards == 1:
            return jnp.asarray(self.embedding, dtype)[ids]
        split = ids.reshape(self.shards, -1, ids.shape[1])
        x = jax.vmap(lambda table, ids: table[ids])(jnp.asarray(self.copies, dtype), split)
        return x.reshape(*ids.shape, -1)


def project(x: Float[Array, "*B D"], matrix: Float[Array, "V D"]) -> Float[Array, "*B V"]:
    """Returns the dot products of vectors with the rows of a matrix, in float32."""
    return multiply(x, matrix.astype(x.dtype).T, dtype=jnp.float32)


def check_length(config: ModelConfig, length: Any) -> None:
    """Checks a length against `model.max_length`. UserError: it is above it.

    A symbolic length (`jax.export`) is not checked.
    """
    if isinstance(length, int) and length > config.max_length:
        raise UserError(f"length={length}: must be at most model.max_length={config.max_length}")
