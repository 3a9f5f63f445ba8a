"""Layers of the encoder and the decoder, and their stacks (sections 3.1 to 3.3)."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.attention.kernels import AnyKernel
from transformer_jax.attention.masks import Mask
from transformer_jax.attention.multi_head import Context, KeysValues, KVCache, MultiHeadAttention
from transformer_jax.attention.positions import RelativeBias, alibi
from transformer_jax.config import ModelConfig
from transformer_jax.dropout import dropout
from transformer_jax.models.feed_forward import FeedForward
from transformer_jax.models.self_layers import make_self_layer
from transformer_jax.types import (
    Auxiliary,
    Constrain,
    DecodeState,
    Hidden,
    Key,
    LayerState,
    Memory,
    Size,
    unconstrained,
)

HIDDEN = ("batch", "length", None)
"""Logical names of the dimensions of hidden states."""


class _Layer(nn.Module):
    """Base class of encoder and decoder layers: residual sums, normalization and feed-forward."""

    config: ModelConfig
    kernel: AnyKernel = "auto"
    constrain: Constrain = unconstrained

    def _input(self, norm: nn.LayerNorm, x: Hidden) -> Hidden:
        """Returns the input of a sub-layer: x, with pre-norm normalized."""
        return norm(x) if self.config.norm == "pre" else x

    def _add(self, norm: nn.LayerNorm, x: Hidden, y: Hidden, rng: Key | None) -> Hidden:
        """Returns x + dropout(y), y being the sub-layer's output, with post-norm normalized.

        (Sections 3.1 and 5.4)
        """
        x = x + dropout(y, self.config.dropout, rng)
        return self.constrain(norm(x) if self.config.norm == "post" else x, HIDDEN)

    def _attention(self, role: str) -> MultiHeadAttention:
        return MultiHeadAttention(self.config, role, self.kernel, self.constrain)

    def _set_up_ffn(self) -> None:
        self.ffn = FeedForward(self.config, self.constrain)
        self.ffn_norm = layer_norm(self.config)

    def _feed_forward(self, x: Hidden, rngs: Sequence[Key | None]) -> tuple[Hidden, Auxiliary]:
        """Applies the last sub-layer, with the rngs of its hidden layer and of its output."""
        y, auxiliary = self.ffn(self._input(self.ffn_norm, x), rngs[0])
        return self._add(self.ffn_norm, x, y, rngs[1]), auxiliary.within("ffn")


class EncoderLayer(_Layer):
    """Self-attention and feed-forward (section 3.1)."""

    def setup(self) -> None:
        self.self_attention = self._attention("encoder_attention")
        self.self_attention_norm = layer_norm(self.config)
        self._set_up_ffn()

    def __call__(
        self, x: Hidden, context: Context, rng: Key | None = None
    ) -> tuple[Hidden, Auxiliary]:
        """Returns the output and the auxiliary values of both sub-layers."""
        rngs = split_rng(rng, 4)

        y = self._input(self.self_attention_norm, x)
        y, attention = self.self_attention(y, context, rngs[0])
        x = self._add(self.self_attention_norm, x, y, rngs[1])

        x, ffn = self._feed_forward(x, rngs[2:])
        return x, attention | ffn


class DecoderLayer(_Layer):
    """Causal self-attention, or what takes its place, cross-attention and feed-forward.

    (Section 3.1)
    """

    def setup(self) -> None:
        config = self.config
        self.self_attention = make_self_layer(config, self.kernel, self.constrain)
        self.self_attention_norm = layer_norm(config)
        self.cross_attention = self._attention("cross_attention")
        self.cross_attention_norm = layer_norm(config)
        self._set_up_ffn()

    def __call__(
        self,
        x: Hidden,
        context: Context,
        keys_values: KeysValues,
        cross_context: Context,
        rng: Key | None = None,
        state: LayerState | None = None,
    ) -> tuple[Hidden, LayerState | None, Auxiliary]:
        """Returns the output, the new state, and the auxiliary values of the three sub-layers.

        state: that of a decode step, in which `x` is [B, K, D], a position of K hypotheses; None:
        `x` has all positions.
        """
        rngs = split_rng(rng, 6)

        y = self._input(self.self_attention_norm, x)
        if state is None:
            y, self_attention = self.self_attention(y, context, rngs[0])
        else:
            y, state, self_attention = self.self_attention.step(y, state, context)
        x = self._add(self.self_attention_norm, x, y, rngs[1])

        y = self._input(self.cross_attention_norm, x)
        y, attention = self.cross_attention(y, cross_context, rngs[2], keys_values)
        x = self._add(self.cross_attention_norm, x, y, rngs[3])

        x, ffn = self._feed_forward(x, rngs[4:])
        return x, state, self_attention | attention | ffn


_MAKING_CLASSES = threading.Lock()
"""Held while Flax makes a class. It changes the fields of the base classes meanwhile, and several
threads may trace models."""


class _Stack(nn.Module):
    """Base class of both stacks: layers, position biases, and with pre-norm a final layer norm.

    Layers that are alike are traced once: `nn.jit` knows those of equal configs.
    """

    config: ModelConfig
    kernel: AnyKernel = "auto"
    constrain: Constrain = unconstrained
    remat: str = "none"

    def _set_up(self, layer: type[_Layer], depth: int) -> None:
        config = self.config
        # The backward pass recomputes all but the inputs of layers, or the results of matmuls, too.
        policies = {"layers": None, "matmuls": jax.checkpoint_policies.dots_saveable}
        with _MAKING_CLASSES:
            if self.remat != "none":
                layer = nn.remat(layer, policy=policies[self.remat])
            layer = nn.jit(layer)
        self.layers = [layer(config.of_layer(i), self.kernel, self.constrain) for i in range(depth)]
        self.norm = layer_norm(config) if config.norm == "pre" else lambda x: x
        if config.positions == "relative":
            self.bias = RelativeBias(config.heads, both_sides=isinstance(self, Encoder))

    def _context(
        self, mask: Mask, queries: Size, keys: Size, index: Int[Array, ""] | None = None
    ) -> Context:
        """Returns the context of self-attention, including the bias, that all layers share."""
        query_positions, key_positions = mask.positions(queries, keys)
        bias = None
        if self.config.positions == "alibi":
            bias = alibi(query_positions, key_positions, self.config.heads)
        elif self.config.positions == "relative":
            bias = self.bias(query_positions, key_positions)
        return Context(mask, query_positions, bias, index)


class Encoder(_Stack):
    """N encoder layers, with pre-norm followed by layer normalization."""

    def setup(self) -> None:
        self._set_up(EncoderLayer, self.config.depths[0])

    def __call__(self, x: Hidden, mask: Mask, rng: Key | None = None) -> tuple[Hidden, Auxiliary]:
        """Returns the memory, and the auxiliary values of the layers under their numbers."""
        rngs = split_rng(rng, len(self.layers))
        context = self._context(mask, x.shape[1], x.shape[1])
        auxiliary = Auxiliary()
        for i, layer in enumerate(self.layers):
            x, of_layer = layer(x, context, rngs[i])
            auxiliary |= of_layer.within(str(i))
        return self.norm(x), auxiliary


class Decoder(_Stack):
    """M decoder layers, with pre-norm followed by layer normalization."""

    def setup(self) -> None:
        self._set_up(DecoderLayer, self.config.depths[1])

    def __call__(
        self, x: Hidden, memory: Memory, mask: Mask, cross_mask: Mask, rng: Key | None = None
    ) -> tuple[Hidden, Auxiliary]:
        """Returns the output at all target positions, and auxiliary values as the encoder does."""
        rngs = split_rng(rng, len(self.layers))
        context = self._context(mask, x.shape[1], x.shape[1])
        keys_values = self.project(memory)
        auxiliary = Auxiliary()
        for i, layer in enumerate(self.layers):
            x, _, of_layer = layer(x, context, keys_values[i], Context(cross_mask), rngs[i])
            auxiliary |= of_layer.within(str(i))
        return self.norm(x), auxiliary

    def project(self, memory: Memory) -> list[KeysValues]:
        """Returns the keys and values of the memory for the cross-attention of each layer."""
        return [layer.cross_attention.project(memory) for layer in self.layers]

    def init_state(
        self, memory: Memory, source_segments: Int[Array, "B S"], beams: int, length: Size
    ) -> DecodeState:
        """Returns the state of `beams` hypotheses per sentence, of at most `length` ids.

        The keys and values of cross-attention are computed here, once per sentence.
        """
        rows = memory.shape[0]
        return DecodeState(
            tuple(map(KVCache.of_memory, self.project(memory))),
            source_segments,
            tuple(each.self_attention.init_state(rows, beams, length) for each in self.layers),
            jnp.zeros((rows, beams, length), jnp.int32),
        )

    def step(
        self, x: Float[Array, "B K D"], state: DecodeState, index: Int[Array, ""]
    ) -> tuple[Float[Array, "B K D"], DecodeState, Auxiliary]:
        """Returns the output at position `index` of K hypotheses, the new state, and the auxiliary
        values. The hypotheses of a sentence are the queries of attention, so that neither its
        memory nor its cache is ever copied."""
        beams, length = state.slots.shape[1:]
        # All queries of a sentence have the same position, so they are not aligned with the keys.
        positions = jnp.full((1, beams), index)
        mask, slots = Mask(query_positions=positions, causal=True, aligned=False), state.slots
        if beams > 1:
            # Each hypothesis writes to its own slot of this position. It sees, at each position,
            # the slot of the hypothesis that it continues, among the keys of all K.
            latest = jnp.broadcast_to(jnp.arange(beams)[None], slots.shape[:2])
            slots = jax.lax.dynamic_update_index_in_dim(slots, latest, index, axis=2)
            visible = slots[..., None] == jnp.arange(beams)[None, None, None]
            visible = visible.reshape(*slots.shape[:2], -1)
            key_positions = jnp.repeat(jnp.arange(length), beams)[None]
            mask = replace(mask, key_positions=key_positions, visible=visible)
        context = self._context(mask, beams, length * beams, index)
        cross = Mask(query_positions=positions, key_segments=state.source_segments, aligned=False)
        states, auxiliary = [], Auxiliary()
        for i, layer in enumerate(self.layers):
            keys_values = state.cross_attention[i].read()
            x, layer_state, of_layer = layer(
                x, context, keys_values, Context(cross), None, state.self_layers[i]
            )
            states.append(layer_state)
            auxiliary |= of_layer.within(str(i))
        state = state._replace(self_layers=tuple(states), slots=slots)
        return self.norm(x), state, auxiliary


def layer_norm(config: ModelConfig) -> nn.LayerNorm:
    """Returns the layer normalization that `config` describes (Ba et al. 2016)."""
    return nn.LayerNorm(config.norm_eps, dtype=jnp.dtype(config.dtype))


def split_rng(rng: Key | None, count: int) -> list[Key | None]:
    """Returns `count` rngs; in evaluation None for each."""
    return [None] * count if rng is None else list(jax.random.split(rng, count))
