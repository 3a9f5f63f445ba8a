"""The simpler simple recurrent unit (SSRU), a recurrent layer in place of self-attention."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_jax.attention.kernels import AnyKernel
from transformer_jax.attention.multi_head import Context
from transformer_jax.config import ModelConfig
from transformer_jax.dense import dense
from transformer_jax.types import (
    Auxiliary,
    Constrain,
    Hidden,
    Key,
    LayerState,
    Size,
    unconstrained,
)

STATE = ("batch", "length", "state")
"""Logical names of the dimensions of cells."""


class SSRU(nn.Module):
    """A cell cₜ = fₜ cₜ₋₁ + (1 - fₜ) W xₜ with the forget gate fₜ = σ(W_f xₜ + b_f) and the output
    max(0, cₜ); c is 0 before the first position.

    A decode step takes the same time at each position. In training, a scan of logarithmic depth
    computes all positions. Cells are float32. (Kim et al. 2019, "From Research to Production and
    Back: Ludicrously Fast Neural Machine Translation", section 3.1)
    """

    config: ModelConfig
    kernel: AnyKernel = "auto"
    constrain: Constrain = unconstrained

    def setup(self) -> None:
        width = self.config.d_model
        self.forget = dense(self.config, width, bias=True)
        self.candidate = dense(self.config, width, bias=False)

    def __call__(
        self, x: Hidden, context: Context, rng: Key | None = None
    ) -> tuple[Hidden, Auxiliary]:
        """Returns the output at all positions; sentences of a packed row do not see each other."""
        _, cell = jax.lax.associative_scan(_compose, self._gates(x, context), axis=1)
        return self._output(cell, x), Auxiliary()

    def init_state(self, sentences: Size, beams: int, length: Size) -> LayerState:
        """Returns the cell before the first position."""
        return LayerState((), jnp.zeros((sentences, beams, self.config.d_model)))

    def step(
        self, x: Float[Array, "B K D"], state: LayerState, context: Context
    ) -> tuple[Float[Array, "B K D"], LayerState, Auxiliary]:
        """Returns the output for K hypotheses, their cells, and no auxiliary values."""
        kept, added = self._gates(x, context)
        cell = kept * state.carry + added
        return self._output(cell, x), LayerState((), cell), Auxiliary()

    @staticmethod
    def grow(state: LayerState, beams: int, length: int) -> LayerState:
        """Returns the state, which has the same size for any number of positions."""
        return state

    def _gates(self, x: Hidden, context: Context) -> tuple[Hidden, Hidden]:
        """Returns the share that is kept of the cell before, and what is added to it."""
        forget = nn.sigmoid(self.forget(x).astype(jnp.float32))
        added = (1 - forget) * self.candidate(x).astype(jnp.float32)
        is_first = (context.positions == 0)[..., None]
        return jnp.where(is_first, 0.0, forget), added

    def _output(self, cell: Hidden, x: Hidden) -> Hidden:
        return nn.relu(self.constrain(cell, STATE)).astype(x.dtype)


def _compose(earlier: tuple[Array, Array], later: tuple[Array, Array]) -> tuple[Array, Array]:
    """Returns the map c -> kept c + added that applies two such maps in turn."""
    return later[0] * earlier[0], later[0] * earlier[1] + later[1]
