"""The encoder-decoder Transformer (Vaswani et al. 2017, section 3) as a pure Linen module.

The only collection is "params". Dropout keys, caches and masks are arguments and return values;
`key=None` means evaluation: no dropout.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.attention import KVCache, Mask, padding_mask
from transformer_jax.errors import UserError
from transformer_jax.models.base import Model, token_means
from transformer_jax.models.embedding import Embedding, check_length
from transformer_jax.models.layers import Decoder, Encoder, split_key
from transformer_jax.types import Auxiliary, Batch, DecodeState, Key, ModelOutput, Size


class Transformer(Model):
    """Maps source and target ids to logits over the target vocabulary."""

    def setup(self) -> None:
        config = self.config
        shards = 1 if config.tied == "none" else self.shards
        self.target_embedding = Embedding(config, self.target_vocabulary, self.constrain, shards)
        if config.tied == "all":
            if self.source_vocabulary != self.target_vocabulary:
                raise UserError(
                    f"model.tied='all': needs one vocabulary, not {self.source_vocabulary} and "
                    f"{self.target_vocabulary} ids; set model.tied=decoder or tokenizer.joint=true"
                )
            self.source_embedding = self.target_embedding
        else:
            self.source_embedding = Embedding(config, self.source_vocabulary, self.constrain)
        self.encoder = Encoder(config, self.kernel, self.constrain, self.remat)
        self.decoder = Decoder(config, self.kernel, self.constrain, self.remat)
        if config.decoder_start_id >= self.target_vocabulary:
            raise UserError(
                f"model.decoder_start_id={config.decoder_start_id}: must be below the target's "
                f"{self.target_vocabulary} ids"
            )
        self._set_up_output()

    def __call__(self, batch: Batch, key: Key | None = None) -> ModelOutput:
        """Returns the logits at every target position, with teacher forcing."""
        encoder_key, decoder_key = split_key(key, 2)
        memory, encoder = self.encode(
            batch.source, batch.source_segments, batch.source_positions, key=encoder_key
        )
        if batch.target_segments is None:
            self_mask, cross_mask = Mask(causal=True), padding_mask(batch.source)
        else:
            own = batch.target_segments, batch.target_positions
            self_mask = Mask(*own, *own, causal=True)
            cross_mask = Mask(*own, batch.source_segments, batch.source_positions, aligned=False)
        embedding_key, layers_key = split_key(decoder_key, 2)
        x = self.target_embedding(batch.target_in, batch.target_positions, embedding_key)
        x, _, decoder = self.decoder(
            x, self.decoder.project(memory), self_mask, cross_mask, layers_key
        )
        decoder = decoder.within("decoder")
        metrics = token_means(encoder.metrics, batch.source)
        metrics |= token_means(decoder.metrics, batch.target_out)
        both = encoder | decoder
        return ModelOutput(self.logits(x), both.losses, metrics, both.weights)

    def prefill(self, source: Int[Array, "B S"], beams: int, length: Size) -> DecodeState:
        """Returns the initial state for `beams` hypotheses per sentence, of at most `length` ids.

        Its memory holds the keys and values of cross-attention, computed once per sentence, and an
        empty self-attention cache, in which each position has a slot for each hypothesis. Its beams
        hold the slots that each hypothesis attends to, [B, K, T]: a search reorders these, and the
        cache stays where it is. UserError: `length` is above `model.max_length`.
        """
        check_length(self.config, length)
        memory, _ = self.encode(source)
        projected = [KVCache.of(layer) for layer in self.decoder.project(memory)]
        caches = self.decoder.init_caches(source.shape[0], length * beams)
        slots = jnp.zeros((source.shape[0], beams, length), jnp.int32)
        return DecodeState((projected, padding_mask(source), caches), slots)

    @staticmethod
    def grow(state: DecodeState, length: int) -> DecodeState:
        """Returns the state, padded to `length` positions."""
        (memory, source_mask, caches), slots = state
        beams, before = slots.shape[1:]
        slots = jnp.pad(slots, ((0, 0), (0, 0), (0, length - before)))
        caches = [cache.grown(length * beams) for cache in caches]
        return DecodeState((memory, source_mask, caches), slots)

    def decode_step(
        self, ids: Int[Array, "B K"], state: DecodeState, index: Int[Array, ""]
    ) -> tuple[Float[Array, "B K V"], DecodeState, Auxiliary]:
        """Returns the logits of the next id, the new state and the auxiliary values.

        `ids` are the ids at position `index` of each hypothesis. The hypotheses of a sentence are
        the queries of attention, so that neither its memory nor its cache is ever copied.
        """
        memory, source_mask, caches = state.memory
        beams, slots = ids.shape[1], state.beams
        # All queries of a sentence have the same position, so they are not aligned with the keys.
        position = jnp.full((1, beams), index)
        self_mask = Mask(query_positions=position, causal=True, aligned=False)
        if beams > 1:
            own = jnp.arange(beams)
            latest = jnp.broadcast_to(own[None], ids.shape)
            slots = jax.lax.dynamic_update_index_in_dim(slots, latest, index, axis=2)
            visible = (slots[..., None] == own[None, None, None]).reshape(*ids.shape, -1)
            key_positions = jnp.repeat(jnp.arange(slots.shape[2]), beams)[None]
            self_mask = replace(self_mask, key_positions=key_positions, visible=visible)
        cross_mask = replace(source_mask, query_positions=position, aligned=False)
        x, caches, auxiliary = self.decoder(
            self.target_embedding(ids, position, None),
            [cache.read() for cache in memory],
            self_mask,
            cross_mask,
            caches=caches,
            index=index * beams,
        )
        state = DecodeState((memory, source_mask, caches), slots)
        return self.logits(x), state, auxiliary.within("decoder")
