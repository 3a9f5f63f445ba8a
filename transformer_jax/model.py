"""The encoder-decoder Transformer (Vaswani et al. 2017, section 3) as pure Linen modules.

A classifier takes its encoder, or its embeddings alone. The only collection is "params". Dropout
keys, caches and masks are arguments and return values; `key=None` means evaluation: no dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from transformer_jax.attention import (
    Attended,
    Choices,
    Kernel,
    KVCache,
    Mask,
    MultiHeadAttention,
    RelativeBias,
    alibi,
    padding_mask,
)
from transformer_jax.config import ModelConfig
from transformer_jax.dropout import dropout
from transformer_jax.types import Batch, DecodeState, Key, Params, Size

Aux = dict[str, Any]
"""What layers return beside their output, by the layer's name: attention weights [B, N, T, S] where
the kernel has them, and under NAME/choices the `Choices` of sampled ones."""


class Sight(NamedTuple):
    """What self-attention is told beside the vectors."""

    mask: Mask
    positions: Int[Array, "#B T"]
    bias: Float[Array, "#B N #T S"] | None


def sinusoids(length: int, d_model: int, layout: str = "interleaved") -> np.ndarray:
    """The table of positions [length, d_model], float32 (section 3.5).

    PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos(...); in the layout "halves" the
    sines stand in the first half of the columns and the cosines in the second.
    """
    rate = 10000.0 ** -(np.arange(0, d_model, 2) / d_model)
    angle = np.arange(length)[:, None] * rate
    waves = np.stack([np.sin(angle), np.cos(angle)], axis=-1 if layout == "interleaved" else 1)
    return waves.reshape(length, d_model).astype(np.float32)


class Embedding(nn.Module):
    """Ids to vectors: scaled embedding plus position (sections 3.4 and 3.5)."""

    config: ModelConfig
    vocabulary: int

    def setup(self) -> None:
        config = self.config
        width = config.d_model
        normal = nn.initializers.normal(width**-0.5)
        self.embedding = self.param("embedding", normal, (self.vocabulary, width))
        if config.positions == "learned":
            shape = (config.max_length, width)
            self.table = self.param("positions", nn.initializers.normal(0.02), shape)
        elif config.positions == "sinusoidal":
            self.table = sinusoids(config.max_length, width, config.position_layout)
        else:
            self.table = None  # self-attention knows of positions instead, or nothing does

    def __call__(
        self, ids: Int[Array, "B T"], positions: Int[Array, "#B T"] | None, key: Key | None
    ) -> Float[Array, "B T D"]:
        """`positions` None: those of one sentence a row, from 0."""
        config = self.config
        if positions is None:
            _check_length(config, ids.shape[1])
            positions = jnp.arange(ids.shape[1])[None, :]
        dtype = jnp.dtype(config.dtype)
        scale = config.d_model**0.5 if config.embedding_scale is None else config.embedding_scale
        x = jnp.asarray(self.embedding, dtype)[ids] * jnp.asarray(scale, dtype)
        if self.table is not None:
            x = x + jnp.asarray(self.table, dtype)[positions]
        return dropout(x, config.dropout, key)


class FeedForward(nn.Module):
    """max(0, x W₁ + b₁) W₂ + b₂ (section 3.3, eq. 2), or with another activation."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], key: Key | None) -> Float[Array, "B T D"]:
        config = self.config

        def dense(features: int, name: str) -> nn.Dense:
            init = nn.initializers.xavier_uniform()
            dtype = jnp.dtype(config.dtype)
            return nn.Dense(features, config.bias, dtype, kernel_init=init, name=name)

        hidden = dense(config.d_ff, "in")(x)
        if config.activation == "swiglu":
            hidden = nn.silu(dense(config.d_ff, "gate")(x)) * hidden
        else:
            hidden = _ACTIVATIONS[config.activation](hidden)
        return dense(config.d_model, "out")(dropout(hidden, config.ffn_dropout, key))


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": nn.relu,
    "gelu": partial(nn.gelu, approximate=False),
    "silu": nn.silu,
}


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward (section 3.1)."""

    config: ModelConfig
    number: int = 0
    kernel: str | Kernel = "auto"

    def setup(self) -> None:
        place = ("encoder_attention", self.number, self.kernel)
        self.self_attention = MultiHeadAttention(self.config, *place)
        self.self_attention_norm = _layer_norm(self.config)
        self.ffn = FeedForward(self.config)
        self.ffn_norm = _layer_norm(self.config)

    def __call__(
        self, x: Float[Array, "B S D"], sight: Sight, key: Key | None
    ) -> tuple[Float[Array, "B S D"], Aux]:
        keys = _split(key, 4)
        mask, positions, bias = sight

        def self_attention(y: Array) -> tuple[Array, Attended]:
            seen = self.self_attention.project(y, positions)
            return self.self_attention(y, seen, mask, keys[0], bias=bias, positions=positions)

        x, own = _residual(self.config, self.self_attention_norm, self_attention, x, keys[1])
        x, _ = _residual(
            self.config, self.ffn_norm, lambda y: (self.ffn(y, keys[2]), None), x, keys[3]
        )
        return x, _named(self_attention=own)


class DecoderLayer(nn.Module):
    """Causal self-attention, attention over the memory, and feed-forward (section 3.1)."""

    config: ModelConfig
    number: int = 0
    kernel: str | Kernel = "auto"

    def setup(self) -> None:
        place = (self.number, self.kernel)
        self.self_attention = MultiHeadAttention(self.config, "decoder_attention", *place)
        self.self_attention_norm = _layer_norm(self.config)
        self.cross_attention = MultiHeadAttention(self.config, "cross_attention", *place)
        self.cross_attention_norm = _layer_norm(self.config)
        self.ffn = FeedForward(self.config)
        self.ffn_norm = _layer_norm(self.config)

    def __call__(
        self,
        x: Float[Array, "R T D"],
        memory: KVCache,
        sight: Sight,
        cross_mask: Mask,
        key: Key | None = None,
        cache: tuple[KVCache, Int[Array, ""]] | None = None,
    ) -> tuple[Float[Array, "R T D"], KVCache, Aux]:
        """R rows of T positions, over the `memory` keys and values of B sentences (R = B · beams).

        With a `cache` of earlier positions (R rows, and the index where x goes) x attends to
        those too. Returns the output, the keys and values of self-attention, and the weights.
        """
        keys = _split(key, 6)
        mask, positions, bias = sight

        def self_attention(y: Array) -> tuple[Array, tuple[KVCache, Attended]]:
            seen = self.self_attention.project(y, positions)
            if cache is not None:
                seen = cache[0].put(seen, cache[1])
            y, attended = self.self_attention(
                y, seen, mask, keys[0], bias=bias, positions=positions
            )
            return y, (seen, attended)

        def cross_attention(y: Array) -> tuple[Array, Attended]:
            # The beams of a sentence are so many query positions: its memory is never copied.
            queries = y.reshape(memory.key.shape[0], -1, y.shape[-1])
            joined, attended = self.cross_attention(queries, memory, cross_mask, keys[2])
            return joined.reshape(y.shape), attended

        config = self.config
        x, (seen, own) = _residual(config, self.self_attention_norm, self_attention, x, keys[1])
        x, cross = _residual(config, self.cross_attention_norm, cross_attention, x, keys[3])
        x, _ = _residual(config, self.ffn_norm, lambda y: (self.ffn(y, keys[4]), None), x, keys[5])
        return x, seen, _named(self_attention=own, cross_attention=cross)


class Encoder(nn.Module):
    """N encoder layers; pre-norm adds a last normalisation."""

    config: ModelConfig
    kernel: str | Kernel = "auto"

    def setup(self) -> None:
        config, kernel = self.config, self.kernel
        self.layers = [EncoderLayer(config, i, kernel) for i in range(config.depths[0])]
        if config.norm == "pre":
            self.norm = _layer_norm(config)
        if config.positions == "relative":
            self.bias = RelativeBias(config.heads, both_sides=True)

    def __call__(
        self, x: Float[Array, "B S D"], mask: Mask, key: Key | None
    ) -> tuple[Float[Array, "B S D"], Aux]:
        keys = _split(key, len(self.layers))
        sight = _look(self, mask, x.shape[1], x.shape[1])
        aux: Aux = {}
        for i, layer in enumerate(self.layers):
            x, more = layer(x, sight, keys[i])
            aux |= {f"encoder/{i}/{name}": weights for name, weights in more.items()}
        return self.norm(x) if self.config.norm == "pre" else x, aux


class Decoder(nn.Module):
    """M decoder layers; pre-norm adds a last normalisation."""

    config: ModelConfig
    kernel: str | Kernel = "auto"

    def setup(self) -> None:
        config, kernel = self.config, self.kernel
        self.layers = [DecoderLayer(config, i, kernel) for i in range(config.depths[1])]
        if config.norm == "pre":
            self.norm = _layer_norm(config)
        if config.positions == "relative":
            self.bias = RelativeBias(config.heads, both_sides=False)

    def project(self, memory: Float[Array, "B S D"]) -> list[KVCache]:
        """Keys and values of the memory for each layer's cross-attention."""
        return [layer.cross_attention.project(memory) for layer in self.layers]

    def __call__(
        self,
        x: Float[Array, "R T D"],
        memory: list[KVCache],
        self_mask: Mask,
        cross_mask: Mask,
        key: Key | None = None,
        caches: list[KVCache] | None = None,
        index: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "R T D"], list[KVCache], Aux]:
        """As `DecoderLayer`, with one memory and one cache a layer."""
        keys = _split(key, len(self.layers))
        length = x.shape[1] if caches is None else caches[0].key.shape[2]
        sight = _look(self, self_mask, x.shape[1], length)
        aux: Aux = {}
        seen: list[KVCache] = []
        for i, layer in enumerate(self.layers):
            cache = None if caches is None or index is None else (caches[i], index)
            x, new, more = layer(x, memory[i], sight, cross_mask, keys[i], cache)
            seen.append(new)
            aux |= {f"decoder/{i}/{name}": weights for name, weights in more.items()}
        return self.norm(x) if self.config.norm == "pre" else x, seen, aux


class Transformer(nn.Module):
    """Source and target ids to logits over the target's vocabulary."""

    config: ModelConfig
    source_vocabulary: int
    target_vocabulary: int
    kernel: str | Kernel = "auto"

    def setup(self) -> None:
        config = self.config
        self.target_embedding = Embedding(config, self.target_vocabulary)
        if config.tied == "all":
            if self.source_vocabulary != self.target_vocabulary:
                raise ValueError(
                    f"model.tied='all': needs one vocabulary, not {self.source_vocabulary} and "
                    f"{self.target_vocabulary} ids; set model.tied=decoder or tokenizer.joint=true"
                )
            self.source_embedding = self.target_embedding
        else:
            self.source_embedding = Embedding(config, self.source_vocabulary)
        self.encoder = Encoder(config, self.kernel)
        self.decoder = Decoder(config, self.kernel)
        if config.decoder_start_id >= self.target_vocabulary:
            raise ValueError(
                f"model.decoder_start_id={config.decoder_start_id}: must be below the target's "
                f"{self.target_vocabulary} ids"
            )
        self._set_output_up()

    def _set_output_up(self) -> None:
        shape = (self.target_vocabulary, self.config.d_model)
        if self.config.tied == "none":
            self.output = self.param("output", nn.initializers.xavier_uniform(), shape)
        if self.config.output_bias:
            self.output_bias = self.param("output_bias", nn.initializers.zeros, shape[:1])

    def __call__(self, batch: Batch, key: Key | None = None) -> tuple[Float[Array, "B T V"], Aux]:
        """Logits at every target position, each seeing the target before it (teacher forcing)."""
        encoder_key, decoder_key = _split(key, 2)
        memory, encoder_aux = self.encode(
            batch.source, batch.source_segments, batch.source_positions, key=encoder_key
        )
        if batch.target_segments is None:
            self_mask, cross_mask = Mask(causal=True), padding_mask(batch.source)
        else:
            own = batch.target_segments, batch.target_positions
            self_mask = Mask(*own, *own, causal=True)
            cross_mask = Mask(*own, batch.source_segments, batch.source_positions, aligned=False)
        embedding_key, layers_key = _split(decoder_key, 2)
        x = self.target_embedding(batch.target_in, batch.target_positions, embedding_key)
        x, _, decoder_aux = self.decoder(
            x, self.decoder.project(memory), self_mask, cross_mask, layers_key
        )
        return self.logits(x), encoder_aux | decoder_aux

    def encode(
        self,
        source: Int[Array, "B S"],
        segments: Int[Array, "B S"] | None = None,
        positions: Int[Array, "B S"] | None = None,
        *,
        key: Key | None = None,
    ) -> tuple[Float[Array, "B S D"], Aux]:
        """The memory: one vector for each source position."""
        own = segments, positions
        mask = padding_mask(source) if segments is None else Mask(*own, *own)
        embedding_key, layers_key = _split(key, 2)
        x = self.source_embedding(source, positions, embedding_key)
        return self.encoder(x, mask, layers_key)

    def logits(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Scores of every target id in float32 (section 3.4)."""
        matrix = self.output if self.config.tied == "none" else self.target_embedding.embedding
        logits = jnp.einsum(
            "...d,vd->...v", x, matrix.astype(x.dtype), preferred_element_type=jnp.float32
        )
        if self.config.output_bias:
            logits += self.output_bias.reshape((1,) * (logits.ndim - 1) + (-1,))
        return logits

    def start(self, source: Int[Array, "B S"], beams: int, length: int) -> DecodeState:
        """The state of decoding `beams` hypotheses a sentence, of at most `length` tokens."""
        config = self.config
        _check_length(config, length)
        memory, _ = self.encode(source)
        caches: list[KVCache] = []
        for layer in range(config.depths[1]):
            plain = config.decoder_attention.of_layer(layer).kind == "plain"
            heads = config.heads if plain else config.kv_heads or config.heads
            shape = (source.shape[0], beams, heads, length, config.head_size)
            caches.append(KVCache(*[jnp.zeros(shape, jnp.dtype(config.dtype))] * 2))
        return DecodeState((self.decoder.project(memory), padding_mask(source)), caches)

    def step(
        self, ids: Int[Array, "B K"], state: DecodeState, index: Int[Array, ""]
    ) -> tuple[Float[Array, "B K V"], DecodeState, Aux]:
        """Logits of the next id after `ids`, the ids at position `index` of each hypothesis."""
        (memory, cross_mask), (sentences, beams) = state.memory, ids.shape
        # All queries of a sentence are at one position: none is aligned with the keys.
        here = jnp.full((1, beams), index)
        cross_mask = replace(cross_mask, query_positions=here, aligned=False)
        caches = jax.tree.map(lambda c: c.reshape(-1, *c.shape[2:]), state.beams)
        here = jnp.reshape(index, (1, 1))
        self_mask = Mask(query_positions=here, causal=True, aligned=False)
        x = self.target_embedding(ids.reshape(-1, 1), here, None)
        x, caches, aux = self.decoder(x, memory, self_mask, cross_mask, caches=caches, index=index)
        caches = jax.tree.map(lambda c: c.reshape(sentences, beams, *c.shape[1:]), caches)
        logits = self.logits(x[:, 0]).reshape(sentences, beams, -1)
        return logits, DecodeState(state.memory, caches), aux


class Classifier(Transformer):
    """Source ids to logits of labels, which take the place of the target's tokens.

    Each label, and the end symbol behind the last one, has a query of its own that attends over the
    encoder's output, or with `layers=0` over the embeddings: of kind soft that is attention
    pooling, of kind latent the model of Chen et al. 2016 (section 3), with a projection of the
    embeddings where the paper sums vectors of a second table. No label knows of another.
    """

    def setup(self) -> None:
        config = self.config
        self.source_embedding = Embedding(config, self.source_vocabulary)
        self.encoder = Encoder(config, self.kernel)
        self.cross_attention = MultiHeadAttention(config, "cross_attention", 0, self.kernel)
        shape = ((config.labels or 0) + 1, config.d_model)
        self.queries = self.param("queries", nn.initializers.normal(1.0), shape)
        self._set_output_up()

    def __call__(self, batch: Batch, key: Key | None = None) -> tuple[Float[Array, "B T V"], Aux]:
        """Logits of the first T labels. ValueError: there are not so many."""
        encoder_key, labels_key = _split(key, 2)
        check_labels(self.config, batch.target_out.shape[1])
        memory, encoder_aux = self.encode(batch.source, key=encoder_key)
        queries = self.queries[: batch.target_out.shape[1]]
        logits, aux = self._label(queries, memory, padding_mask(batch.source), labels_key)
        return logits, encoder_aux | aux

    def _label(
        self,
        queries: Float[Array, "T D"],
        memory: Float[Array, "B S D"],
        mask: Mask,
        key: Key | None = None,
    ) -> tuple[Float[Array, "B T V"], Aux]:
        keys = _split(key, 2)
        x = jnp.broadcast_to(queries.astype(memory.dtype), (memory.shape[0], *queries.shape))
        projected = self.cross_attention.project(memory)
        y, attended = self.cross_attention(x, projected, mask, keys[0])
        x = x + dropout(y, self.config.dropout, keys[1])
        aux = {f"labels/{name}": found for name, found in _named(cross_attention=attended).items()}
        return self.logits(x), aux

    def start(self, source: Int[Array, "B S"], beams: int, length: int) -> DecodeState:
        """The logits of all labels; hypotheses, of whatever number and length, have no state."""
        memory, _ = self.encode(source)
        logits, _ = self._label(self.queries, memory, padding_mask(source))
        return DecodeState(logits, ())

    def step(
        self, ids: Int[Array, "B K"], state: DecodeState, index: Int[Array, ""]
    ) -> tuple[Float[Array, "B K V"], DecodeState, Aux]:
        """Logits of the label at position `index`, whatever `ids` came before."""
        logits = jnp.take(state.memory, index, axis=1, mode="clip")[:, None]
        return jnp.broadcast_to(logits, (*ids.shape, logits.shape[-1])), state, {}


def make_model(
    config: ModelConfig,
    source_vocabulary: int,
    target_vocabulary: int,
    kernel: str | Kernel = "auto",
) -> Transformer:
    """The model that `config` describes: a `Classifier` if it has labels."""
    kind = Transformer if config.labels is None else Classifier
    return kind(config, source_vocabulary, target_vocabulary, kernel)


def check_labels(config: ModelConfig, length: int) -> None:
    """ValueError: a target of `length` tokens has more labels than a classifier knows."""
    if config.labels is not None and length > config.labels + 1:
        raise ValueError(
            f"model.labels={config.labels}: must be at least {length - 1}, since there are targets "
            f"of {length} tokens with the end symbol"
        )


def abstract_params(model: Transformer) -> Params:
    """The tree of the model's parameters, with shapes and types in the place of arrays."""
    ids = jnp.zeros((1, 1), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), Batch(ids, ids, ids))["params"]


def count_parameters(config: ModelConfig, source_vocabulary: int, target_vocabulary: int) -> int:
    """The number of parameters of a model."""
    tree = abstract_params(make_model(config, source_vocabulary, target_vocabulary))
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _layer_norm(config: ModelConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.norm_eps, dtype=jnp.dtype(config.dtype))


def _residual(
    config: ModelConfig,
    norm: Callable[[Array], Array],
    sublayer: Callable[[Array], tuple[Array, Any]],
    x: Array,
    key: Key | None,
) -> tuple[Array, Any]:
    """norm(x + dropout(sublayer(x))) (section 5.4); pre-norm: x + dropout(sublayer(norm(x))).

    What the sub-layer returns beside its output is passed on.
    """
    y, rest = sublayer(norm(x) if config.norm == "pre" else x)
    y = x + dropout(y, config.dropout, key)
    return y if config.norm == "pre" else norm(y), rest


def _split(key: Key | None, count: int) -> list[Key] | list[None]:
    return [None] * count if key is None else list(jax.random.split(key, count))


def _check_length(config: ModelConfig, length: Any) -> None:
    """ValueError: more positions than are encoded. A symbolic length (`jax.export`) passes."""
    if isinstance(length, int) and length > config.max_length:
        raise ValueError(f"length={length}: must be at most model.max_length={config.max_length}")


def _look(stack: Encoder | Decoder, mask: Mask, queries: Size, keys: Size) -> Sight:
    """What a stack's self-attention is told; all its layers share the bias of positions."""
    row, column = mask.positions(queries, keys)
    config, bias = stack.config, None
    if config.positions == "alibi":
        bias = alibi(row, column, config.heads)
    elif config.positions == "relative":
        bias = stack.bias(row, column)
    return Sight(mask, row, bias)


def _named(**attended: Attended) -> Aux:
    weights = {name: a.weights for name, a in attended.items()}
    choices = {f"{name}/choices": a.choices for name, a in attended.items()}
    return {name: found for name, found in (weights | choices).items() if found is not None}


def choices_of(aux: Any) -> list[Choices]:
    """The choices that layers have sampled."""
    return [found for found in aux.values() if isinstance(found, Choices)]
