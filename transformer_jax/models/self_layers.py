"""The kinds of layers by which a position of the decoder sees the positions before it.

To add one, write its module and list it in `SELF_LAYERS`. The module has the methods of
`MultiHeadAttention`:

`__call__(x [B, T, D], context, rng) -> (y, Auxiliary)`, for training;
`init_state(sentences, beams, length) -> LayerState`, before the first position;
`step(x [B, K, D], state, context) -> (y, LayerState, Auxiliary)`, for `context.position`;
`grow(state, beams, length) -> LayerState`, padded to `length` positions; it may not use parameters.

`context` has the mask with the segments of packed rows, and positions that count from 0 in each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import flax.linen as nn

from transformer_jax.attention.kernels import AnyKernel
from transformer_jax.attention.multi_head import MultiHeadAttention
from transformer_jax.config import ModelConfig, look_up
from transformer_jax.models.ssru import SSRU
from transformer_jax.types import Constrain, unconstrained


@dataclass(frozen=True)
class SelfLayer:
    """A kind of layer: what makes its module, and what it supports."""

    module: Callable[..., nn.Module]
    """Called with the keywords config, kernel and constrain."""
    positions: tuple[str, ...] = ("sinusoidal", "learned", "none")
    """Values of `model.positions` that it supports."""
    packing: bool = True
    """Whether it supports rows of several sentences."""
    dropout: bool = True
    """Whether it supports models with dropout of attention weights."""
    attention: bool = False
    """Whether `model.decoder_attention` applies to it."""


SELF_LAYERS = {
    "attention": SelfLayer(
        partial(MultiHeadAttention, role="decoder_attention"),
        ("sinusoidal", "learned", "rotary", "alibi", "relative", "none"),
        attention=True,
    ),
    "ssru": SelfLayer(SSRU),
}
"""The kinds of layers by the config's `self_layer`."""


def find_self_layer(label: str) -> SelfLayer:
    """Returns the kind of layer with that label. UserError: it is unknown."""
    return look_up(SELF_LAYERS, label, "model.self_layer")


def make_self_layer(
    config: ModelConfig, kernel: AnyKernel = "auto", constrain: Constrain = unconstrained
) -> nn.Module:
    """Returns the module of the config's `self_layer`."""
    entry = find_self_layer(config.self_layer)
    return entry.module(config=config, kernel=kernel, constrain=constrain)
