"""Layers, a kind and a kernel of one's own, all of which but the first are broken in some way."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from transformer_jax.attention import AttentionOutput, Mask, attend, register_kind
from transformer_jax.attention.kinds import AttentionInputs
from transformer_jax.models.self_layers import SELF_LAYERS, SelfLayer
from transformer_jax.types import Auxiliary, LayerState, Outcome


class Mean(nn.Module):
    """A decoder layer: the mean of all positions so far. Subclasses break it."""

    config: Any
    kernel: Any = "auto"
    constrain: Any = None

    def setup(self) -> None:
        self.out = nn.Dense(self.config.d_model)

    def total(self, x: jax.Array) -> jax.Array:
        return jnp.cumsum(x, axis=1)

    def __call__(self, x: Any, context: Any, rng: Any = None) -> Any:
        return self.out(self.total(x) / (context.positions[..., None] + 1.0)), Auxiliary()

    def init_state(self, sentences: int, beams: int, length: int) -> LayerState:
        return LayerState((), jnp.zeros((sentences, beams, self.config.d_model)))

    def step(self, x: Any, state: LayerState, context: Any) -> Any:
        total = state.carry + x
        return self.out(total / (context.position + 1.0)), LayerState((), total), Auxiliary()

    def grow(self, state: LayerState, beams: int, length: int) -> LayerState:
        return state


class SeesTheNext(Mean):
    """Its mask is off by one."""

    def total(self, x: jax.Array) -> jax.Array:
        return jnp.cumsum(jnp.roll(x, -1, axis=1).at[:, -1].set(0), axis=1)


class LosesItsState(Mean):
    """The sum is not carried on."""

    def step(self, x: Any, state: LayerState, context: Any) -> Any:
        y, _, auxiliary = super().step(x, state, context)
        return y, state, auxiliary


class ForgetsWhenItGrows(Mean):
    """The sum begins anew when the state is given more positions."""

    def grow(self, state: LayerState, beams: int, length: int) -> LayerState:
        return jax.tree.map(jnp.zeros_like, state)


def mean_over_rows(scale: jax.Array, outcome: Outcome) -> jax.Array:
    return scale * jnp.mean(scale + 0 * outcome.log_likelihood)


class AveragesItsLoss(Mean):
    """Its auxiliary loss is a mean, which does not add up over microbatches and devices."""

    def __call__(self, x: Any, context: Any, rng: Any = None) -> Any:
        y, _ = super().__call__(x, context, rng)
        return y, Auxiliary({"size": Partial(mean_over_rows, jnp.mean(jnp.square(y)))}, {}, {})


def causal_by_two(inputs: AttentionInputs) -> AttentionOutput:
    """A kind whose mask lets a position see the one after it."""
    mask = inputs.dense_mask()
    assert mask is not None
    mask = mask | jnp.roll(mask, 1, axis=-1)
    scores = inputs.score(inputs.query, inputs.repeat_heads(inputs.key))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    values = inputs.repeat_heads(inputs.value)
    return AttentionOutput(jnp.einsum("bnts,bnsh->bnth", weights, values), weights)


def sees_padding(query: Any, key: Any, value: Any, mask: Mask | None = None, **rest: Any) -> Any:
    """A kernel that ignores which keys are padding."""
    mask = None if mask is None else Mask(causal=mask.causal)
    return attend(query, key, value, mask, kernel="reference", **rest)


LAYERS = (Mean, SeesTheNext, LosesItsState, ForgetsWhenItGrows, AveragesItsLoss)
for layer in LAYERS:
    SELF_LAYERS[layer.__name__] = SelfLayer(layer, packing=False, dropout=False)
register_kind("causal_by_two", causal_by_two)
