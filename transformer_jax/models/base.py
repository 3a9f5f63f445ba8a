"""Base class of all models: encodes the source and computes the logits."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.attention import Kernel, Mask, padding_mask
from transformer_jax.config import ModelConfig
from transformer_jax.models.embedding import project
from transformer_jax.models.layers import split_key
from transformer_jax.special_ids import PAD
from transformer_jax.types import Auxiliary, Constrain, Key, Mean, unconstrained


class Model(nn.Module):
    """Base class of models. Subclasses set up their submodules and define these methods:

    `__call__(batch, key) -> ModelOutput`, for training, and for decoding
    `prefill(source, beams, length) -> DecodeState`,
    `decode_step(ids, state, index) -> (logits, DecodeState, Auxiliary)` and
    `grow(state, length) -> DecodeState`, which pads the state to `length` positions.

    shards: number of parts of the rows that devices hold; used in training only.
    """

    config: ModelConfig
    source_vocabulary: int
    target_vocabulary: int
    kernel: str | Kernel = "auto"
    constrain: Constrain = unconstrained
    remat: str = "none"
    shards: int = 1

    def encode(
        self,
        source: Int[Array, "B S"],
        segments: Int[Array, "B S"] | None = None,
        positions: Int[Array, "B S"] | None = None,
        *,
        key: Key | None = None,
    ) -> tuple[Float[Array, "B S D"], Auxiliary]:
        """Returns the memory, a vector for each source position, and the auxiliary values."""
        mask = padding_mask(source)
        if segments is not None:
            mask = Mask(segments, positions, segments, positions)
        embedding_key, layers_key = split_key(key, 2)
        x = self.source_embedding(source, positions, embedding_key)
        memory, auxiliary = self.encoder(x, mask, layers_key)
        return memory, auxiliary.within("encoder")

    def logits(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Returns the logits over all target ids in float32 (section 3.4)."""
        tied = self.config.tied != "none"
        logits = self.target_embedding.logits(x) if tied else project(x, self.output)
        if self.config.output_bias:
            logits += self.output_bias.reshape((1,) * (logits.ndim - 1) + (-1,))
        if logits.ndim == 3:
            logits = self.constrain(logits, ("batch", "length", "vocabulary"))
        return logits

    def _set_up_output(self) -> None:
        shape = (self.target_vocabulary, self.config.d_model)
        if self.config.tied == "none":
            self.output = self.param("output", nn.initializers.xavier_uniform(), shape)
        if self.config.output_bias:
            self.output_bias = self.param("output_bias", nn.initializers.zeros, shape[:1])


def token_means(metrics: dict[str, Float[Array, "B T"]], ids: Int[Array, "B T"]) -> dict[str, Mean]:
    """Returns the mean of each metric over the positions of `ids` that are not padding."""
    is_token = ids != PAD
    weight = jnp.sum(is_token).astype(jnp.float32)
    return {
        name: Mean(jnp.sum(jnp.where(is_token, values, 0)), weight)
        for name, values in metrics.items()
    }
