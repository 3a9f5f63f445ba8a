"""The feed-forward sub-layer of both stacks (section 3.3).

To add another hidden layer, write its function and its entry in `ACTIVATIONS`.
"""

from collections.abc import Callable

import flax.linen as nn
from jaxtyping import Array, Float

from transformer_jax.config import ModelConfig
from transformer_jax.dense import dense
from transformer_jax.dropout import dropout
from transformer_jax.types import Auxiliary, Constrain, Hidden, Key, unconstrained

Project = Callable[[str], Float[Array, "B T F"]]
"""A function that applies the dense layer of a name, from D to F, to the network's input."""

ACTIVATIONS: dict[str, Callable[[Project], Float[Array, "B T F"]]] = {
    "relu": lambda project: nn.relu(project("in")),
    "gelu": lambda project: nn.gelu(project("in"), approximate=False),
    "quick_gelu": lambda project: nn.silu(1.702 * project("in")) / 1.702,
    "silu": lambda project: nn.silu(project("in")),
    "swiglu": lambda project: nn.silu(project("gate")) * project("in"),
}
"""The hidden layer of the network by the config's `activation`."""


class FeedForward(nn.Module):
    """The feed-forward network max(0, x W₁ + b₁) W₂ + b₂, or one with another activation.

    (Section 3.3, eq. 2)
    """

    config: ModelConfig
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, x: Hidden, rng: Key | None) -> tuple[Hidden, Auxiliary]:
        """Returns the output, and auxiliary losses and metrics, of which this network has none.

        rng: of dropout on the hidden layer; None: evaluation.
        """
        config = self.config
        activation = ACTIVATIONS[config.activation]
        hidden = activation(lambda name: dense(config, config.d_ff, name=name)(x))
        hidden = self.constrain(hidden, ("batch", "length", "d_ff"))
        output = dense(config, config.d_model, name="out")(dropout(hidden, config.ffn_dropout, rng))
        return output, Auxiliary()
