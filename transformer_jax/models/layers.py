"""Layers of the encoder and the decoder, and their stacks (sections 3.1 to 3.3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.attention import (
    Kernel,
    KeysValues,
    KVCache,
    Mask,
    MultiHeadAttention,
    RelativeBias,
    alibi,
)
from transformer_jax.config import ModelConfig
from transformer_jax.dropout import dropout
from transformer_jax.models.feed_forward import FeedForward
from transformer_jax.types import Auxiliary, Constrain, Key, Size, no_auxiliary, unconstrained

HIDDEN = ("batch", "length", None)
"""Logical names of the dimensions of hidden states."""

LayerType = TypeVar("LayerType", bound=nn.Module)

Keys = list[Key] | list[None]
"""One rng for each use; None: evaluation."""


class SelfAttentionInputs(NamedTuple):
    """Inputs of self-attention besides the hidden states: mask, positions and bias."""

    mask: Mask
    positions: Int[Array, "#B T"]
    bias: Float[Array, "#B #N #T S"] | None


class _Layer(nn.Module):
    """Base class of encoder and decoder layers: self-attention and feed-forward."""

    config: ModelConfig
    kernel: str | Kernel = "auto"
    constrain: Constrain = unconstrained

    def _set_up(self, role: str) -> None:
        self.self_attention = self._attention(role)
        self.self_attention_norm = layer_norm(self.config)
        self.ffn = FeedForward(self.config, self.constrain)
        self.ffn_norm = layer_norm(self.config)

    def _attention(self, role: str) -> MultiHeadAttention:
        return MultiHeadAttention(self.config, role, self.kernel, self.constrain)

    def _attend_to_self(
        self,
        x: Float[Array, "B T D"],
        inputs: SelfAttentionInputs,
        keys: Keys,
        cache: tuple[KVCache, Int[Array, ""]] | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | None, Auxiliary]:
        """Returns the output, the cache with these positions, and the auxiliary values."""
        mask, positions, bias = inputs

        def attend(y: Array) -> tuple[Array, tuple[KVCache | None, Auxiliary]]:
            memory, written = self.self_attention.project(y, positions), None
            if cache is not None:
                written = cache[0].write(memory, cache[1])
                memory = written.read()
            y, auxiliary = self.self_attention(
                y, memory, mask, keys[0], bias=bias, positions=positions
            )
            return y, (written, auxiliary)

        x, (written, auxiliary) = self._residual(self.self_attention_norm, attend, x, keys[1])
        return x, written, auxiliary

    def _feed_forward(
        self, x: Float[Array, "B T D"], keys: Keys
    ) -> tuple[Float[Array, "B T D"], Auxiliary]:
        x, auxiliary = self._residual(self.ffn_norm, lambda y: self.ffn(y, keys[0]), x, keys[1])
        return x, auxiliary.within("ffn")

    def _residual(
        self,
        norm: Callable[[Array], Array],
        sublayer: Callable[[Array], tuple[Array, Any]],
        x: Array,
        key: Key | None,
    ) -> tuple[Array, Any]:
        """Returns norm(x + dropout(sublayer(x))) and the sub-layer's other results.

        With pre-norm, the first is x + dropout(sublayer(norm(x))). (Section 5.4)
        """
        pre_norm = self.config.norm == "pre"
        y, rest = sublayer(norm(x) if pre_norm else x)
        y = x + dropout(y, self.config.dropout, key)
        return self.constrain(y if pre_norm else norm(y), HIDDEN), rest


class EncoderLayer(_Layer):
    """Self-attention and feed-forward (section 3.1)."""

    def setup(self) -> None:
        self._set_up("encoder_attention")

    def __call__(
        self, x: Float[Array, "B S D"], inputs: SelfAttentionInputs, key: Key | None
    ) -> tuple[Float[Array, "B S D"], Auxiliary]:
        """Returns the output and the auxiliary values of attention."""
        keys = split_key(key, 4)
        x, _, own = self._attend_to_self(x, inputs, keys[:2])
        x, ffn = self._feed_forward(x, keys[2:])
        return x, own | ffn


class DecoderLayer(_Layer):
    """Causal self-attention, cross-attention to the memory, and feed-forward (section 3.1)."""

    def setup(self) -> None:
        self._set_up("decoder_attention")
        self.cross_attention = self._attention("cross_attention")
        self.cross_attention_norm = layer_norm(self.config)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: KeysValues,
        inputs: SelfAttentionInputs,
        cross_mask: Mask,
        key: Key | None = None,
        cache: tuple[KVCache, Int[Array, ""]] | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | None, Auxiliary]:
        """Returns the output, the new cache, and the auxiliary values.

        With a `cache` of earlier positions, and the index in it at which to write those of x, x
        attends to all of them.
        """
        keys = split_key(key, 6)

        def attend(y: Array) -> tuple[Array, Auxiliary]:
            return self.cross_attention(y, memory, cross_mask, keys[2])

        x, written, own = self._attend_to_self(x, inputs, keys[:2], cache)
        x, cross = self._residual(self.cross_attention_norm, attend, x, keys[3])
        x, ffn = self._feed_forward(x, keys[4:])
        return x, written, own | cross | ffn


class _Stack(nn.Module):
    """Base class of both stacks: layers, position biases, and with pre-norm a final layer norm.

    Layers that are alike are traced once: `nn.jit` knows those of equal configs.
    """

    config: ModelConfig
    kernel: str | Kernel = "auto"
    constrain: Constrain = unconstrained
    remat: str = "none"

    def _set_up(self, layer: type[_Layer], depth: int, *, both_sides: bool) -> None:
        layer = nn.jit(rematerialized(layer, self.remat))
        self.layers = [
            layer(self.config.of_layer(i), self.kernel, self.constrain) for i in range(depth)
        ]
        if self.config.norm == "pre":
            self.norm = layer_norm(self.config)
        if self.config.positions == "relative":
            self.bias = RelativeBias(self.config.heads, both_sides=both_sides)

    def _self_attention_inputs(self, mask: Mask, queries: Size, keys: Size) -> SelfAttentionInputs:
        """Returns the inputs of self-attention, including the bias, that all layers share."""
        query_positions, key_positions = mask.positions(queries, keys)
        bias = None
        if self.config.positions == "alibi":
            bias = alibi(query_positions, key_positions, self.config.heads)
        elif self.config.positions == "relative":
            bias = self.bias(query_positions, key_positions)
        return SelfAttentionInputs(mask, query_positions, bias)

    def _normalized(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.norm(x) if self.config.norm == "pre" else x


class Encoder(_Stack):
    """N encoder layers, with pre-norm followed by layer normalization."""

    def setup(self) -> None:
        self._set_up(EncoderLayer, self.config.depths[0], both_sides=True)

    def __call__(
        self, x: Float[Array, "B S D"], mask: Mask, key: Key | None
    ) -> tuple[Float[Array, "B S D"], Auxiliary]:
        """Returns the memory, and the auxiliary values of the layers under their numbers."""
        keys = split_key(key, len(self.layers))
        inputs = self._self_attention_inputs(mask, x.shape[1], x.shape[1])
        auxiliaries: list[Auxiliary] = []
        for i, layer in enumerate(self.layers):
            x, auxiliary = layer(x, inputs, keys[i])
            auxiliaries.append(auxiliary.within(str(i)))
        return self._normalized(x), _merged(auxiliaries)


class Decoder(_Stack):
    """M decoder layers, with pre-norm followed by layer normalization."""

    def setup(self) -> None:
        self._set_up(DecoderLayer, self.config.depths[1], both_sides=False)

    def project(self, memory: Float[Array, "B S D"]) -> list[KeysValues]:
        """Returns the keys and values of the memory for the cross-attention of each layer."""
        return [layer.cross_attention.project(memory) for layer in self.layers]

    def init_caches(self, sentences: Size, length: Size) -> list[KVCache]:
        """Returns an empty self-attention cache of `length` keys for each layer."""
        return [layer.self_attention.init_cache(sentences, length) for layer in self.layers]

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: list[KeysValues],
        self_mask: Mask,
        cross_mask: Mask,
        key: Key | None = None,
        caches: list[KVCache] | None = None,
        index: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T D"], list[KVCache | None], Auxiliary]:
        """Applies all layers and returns as `DecoderLayer`, with a cache for each layer.

        `memory` and `caches` have one entry per layer; all caches are written at `index`.
        """
        keys = split_key(key, len(self.layers))
        length = x.shape[1] if caches is None else caches[0].value.shape[2]
        inputs = self._self_attention_inputs(self_mask, x.shape[1], length)
        auxiliaries: list[Auxiliary] = []
        all_written: list[KVCache | None] = []
        for i, layer in enumerate(self.layers):
            cache = None if caches is None or index is None else (caches[i], index)
            x, written, auxiliary = layer(x, memory[i], inputs, cross_mask, keys[i], cache)
            all_written.append(written)
            auxiliaries.append(auxiliary.within(str(i)))
        return self._normalized(x), all_written, _merged(auxiliaries)


def rematerialized(layer: type[LayerType], remat: str) -> type[LayerType]:
    """Returns the class of layers, of whose activations the backward pass keeps the inputs only
    (remat="layers"), the results of matmuls besides (matmuls), or all (none)."""
    policies = {"layers": None, "matmuls": jax.checkpoint_policies.dots_saveable}
    return layer if remat == "none" else nn.remat(layer, policy=policies[remat])


def layer_norm(config: ModelConfig) -> nn.LayerNorm:
    """Returns the layer normalization that `config` describes (Ba et al. 2016)."""
    return nn.LayerNorm(config.norm_eps, dtype=jnp.dtype(config.dtype))


def split_key(key: Key | None, count: int) -> Keys:
    """Returns `count` keys; in evaluation None for each."""
    return [None] * count if key is None else list(jax.random.split(key, count))


def _merged(auxiliaries: list[Auxiliary]) -> Auxiliary:
    return reduce(or_, auxiliaries, no_auxiliary())
