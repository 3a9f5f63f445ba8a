"""The encoder-decoder Transformer (Vaswani et al. 2017, section 3) as a pure Linen module.

The only collection is "params". Rngs, decoding states and masks are arguments and return values;
`rng=None` means evaluation: no dropout.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.attention.kernels import AnyKernel
from transformer_jax.attention.masks import Mask, padding_mask
from transformer_jax.config import ModelConfig
from transformer_jax.models.embedding import Embedding, check_length, project
from transformer_jax.models.layers import Decoder, Encoder, split_rng
from transformer_jax.models.self_layers import make_self_layer
from transformer_jax.special_ids import PAD
from transformer_jax.types import (
    Auxiliary,
    Batch,
    Constrain,
    DecodeState,
    Key,
    Mean,
    Memory,
    ModelOutput,
    Size,
    unconstrained,
)


class Model(nn.Module):
    """Base class of models: encodes the source and computes logits. Subclasses define these:

    `__call__(batch, rng) -> ModelOutput`, for training, and for decoding
    `prefill(source, beams, length) -> state`, a tree whose leaves begin with the sentences,
    `decode_step(ids, state, index) -> (logits, state, Auxiliary)` and
    `grow(state, length) -> state`, padded to `length` positions.

    shards: number of parts of the rows that devices hold; used in training only.
    """

    config: ModelConfig
    source_vocabulary: int
    target_vocabulary: int
    kernel: AnyKernel = "auto"
    constrain: Constrain = unconstrained
    remat: str = "none"
    shards: int = 1

    def encode(
        self,
        source: Int[Array, "B S"],
        segments: Int[Array, "B S"] | None = None,
        positions: Int[Array, "B S"] | None = None,
        *,
        rng: Key | None = None,
    ) -> tuple[Memory, Auxiliary]:
        """Returns the memory, a vector for each source position, and the auxiliary values."""
        mask = padding_mask(source)
        if segments is not None:
            mask = Mask(segments, positions, segments, positions)
        embedding_rng, layers_rng = split_rng(rng, 2)
        x = self.source_embedding(source, positions, embedding_rng)
        memory, auxiliary = self.encoder(x, mask, layers_rng)
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


class Transformer(Model):
    """Maps source and target ids to logits over the target vocabulary."""

    def setup(self) -> None:
        config = self.config
        shards = 1 if config.tied == "none" else self.shards
        self.target_embedding = Embedding(config, self.target_vocabulary, self.constrain, shards)
        if config.tied == "all":
            is_joint = self.source_vocabulary == self.target_vocabulary
            sizes = f"vocabularies of {self.source_vocabulary} and {self.target_vocabulary} ids"
            config.require(is_joint, "tied", f"decoder with {sizes}; or set tokenizer.joint=true")
            self.source_embedding = self.target_embedding
        else:
            self.source_embedding = Embedding(config, self.source_vocabulary, self.constrain)
        self.encoder = Encoder(config, self.kernel, self.constrain, self.remat)
        self.decoder = Decoder(config, self.kernel, self.constrain, self.remat)
        is_known = config.start_id < self.target_vocabulary
        want = f"below the target's {self.target_vocabulary} ids"
        config.require(is_known, "decoder_start_id", want)
        self._set_up_output()

    def __call__(self, batch: Batch, rng: Key | None = None) -> ModelOutput:
        """Returns the logits at every target position, with teacher forcing."""
        encoder_rng, decoder_rng = split_rng(rng, 2)
        source = batch.source_segments, batch.source_positions
        memory, encoder = self.encode(batch.source, *source, rng=encoder_rng)
        if batch.target_segments is None:
            mask, cross_mask = Mask(causal=True), padding_mask(batch.source)
        else:
            target = batch.target_segments, batch.target_positions
            mask = Mask(*target, *target, causal=True)
            cross_mask = Mask(*target, *source, aligned=False)
        embedding_rng, layers_rng = split_rng(decoder_rng, 2)
        x = self.target_embedding(batch.target_in, batch.target_positions, embedding_rng)
        x, decoder = self.decoder(x, memory, mask, cross_mask, layers_rng)
        return to_output(self.logits(x), batch, encoder, decoder.within("decoder"))

    def prefill(self, source: Int[Array, "B S"], beams: int, length: Size) -> DecodeState:
        """Returns the initial state for `beams` hypotheses per sentence, of at most `length` ids.

        UserError: `length` is above `model.max_length`.
        """
        check_length(self.config, length)
        memory, _ = self.encode(source)
        segments = (source != PAD).astype(jnp.int32)
        return self.decoder.init_state(memory, segments, beams, length)

    @nn.nowrap  # which makes a module outside of this one
    def grow(self, state: DecodeState, length: int) -> DecodeState:
        """Returns the state, padded to `length` positions."""
        layer: Any = make_self_layer(self.config)
        beams, before = state.slots.shape[1:]
        return state._replace(
            self_layers=tuple(layer.grow(each, beams, length) for each in state.self_layers),
            slots=jnp.pad(state.slots, ((0, 0), (0, 0), (0, length - before))),
        )

    def decode_step(
        self, ids: Int[Array, "B K"], state: DecodeState, index: Int[Array, ""]
    ) -> tuple[Float[Array, "B K V"], DecodeState, Auxiliary]:
        """Returns the logits of the next id, the new state and the auxiliary values.

        `ids` are the ids at position `index` of each hypothesis.
        """
        x = self.target_embedding(ids, jnp.full((1, ids.shape[1]), index), None)
        x, state, auxiliary = self.decoder.step(x, state, index)
        return self.logits(x), state, auxiliary.within("decoder")


def to_output(
    logits: Float[Array, "B T V"], batch: Batch, of_source: Auxiliary, of_target: Auxiliary
) -> ModelOutput:
    """Returns the output of a model, with the means of metrics over the tokens of each side."""
    metrics: dict[str, Mean] = {}
    for auxiliary, ids in ((of_source, batch.source), (of_target, batch.target_out)):
        is_token = ids != PAD
        weight = jnp.sum(is_token).astype(jnp.float32)
        for name, values in auxiliary.metrics.items():
            metrics[name] = Mean(jnp.sum(jnp.where(is_token, values, 0)), weight)
    both = of_source | of_target
    return ModelOutput(logits, both.losses, metrics, both.weights)
