"""The feed-forward sub-layer of both stacks (section 3.3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import flax.linen as nn
from jaxtyping import Array, Float

from transformer_jax.config import ModelConfig
from transformer_jax.dense import dense
from transformer_jax.dropout import dropout
from transformer_jax.types import Auxiliary, Constrain, Key, no_auxiliary, unconstrained


class FeedForward(nn.Module):
    """The feed-forward network max(0, x W₁ + b₁) W₂ + b₂, or one with another activation.

    (Section 3.3, eq. 2)
    """

    config: ModelConfig
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], key: Key | None
    ) -> tuple[Float[Array, "B T D"], Auxiliary]:
        """Returns the output, and auxiliary losses and metrics, of which this network has none.

        `key` is the rng of dropout on the hidden layer.
        """
        config = self.config
        hidden = dense(config, config.d_ff, name="in")(x)
        if config.activation == "swiglu":
            hidden = nn.silu(dense(config, config.d_ff, name="gate")(x)) * hidden
        else:
            hidden = _ACTIVATIONS[config.activation](hidden)
        hidden = self.constrain(hidden, ("batch", "length", "d_ff"))
        output = dense(config, config.d_model, name="out")(dropout(hidden, config.ffn_dropout, key))
        return output, no_auxiliary()


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": nn.relu,
    "gelu": partial(nn.gelu, approximate=False),
    "silu": nn.silu,
}
