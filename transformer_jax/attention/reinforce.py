"""REINFORCE: the auxiliary loss that trains sampled choices of attention.

Williams 1992; Xu et al. 2015, section 4.1.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_jax.types import Outcome


def reinforce(
    log_probability: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    outcome: Outcome,
    *,
    to_go: bool = False,
) -> Float[Array, ""]:
    """Returns 0, with the gradient of -Σ ((reward - baseline) · log_probability + entropy).

    The sum is over the target tokens. Both arrays are in nats and already weighted by the layer's
    config. The reward, through which no gradient passes, is the token's log-likelihood, and the
    baseline is its running mean, `averages["log_likelihood"]`. Use this for choices in the last
    layer, which change the prediction of their own token only.

    to_go: the rewards are those of a token and all later ones, minus the baseline each. Use this
    for choices in a layer below the last, which change later tokens too.
    """
    gain = outcome.log_likelihood - outcome.averages["log_likelihood"]
    gain = jax.lax.stop_gradient(jnp.where(outcome.is_token, gain, 0))
    if to_go:  # the sum of a token's gain and all later ones
        gain = jnp.cumsum(gain[:, ::-1], axis=1)[:, ::-1]
    total = -jnp.sum(jnp.where(outcome.is_token, gain * log_probability + entropy, 0))
    return total - jax.lax.stop_gradient(total)


reinforce_to_go = partial(reinforce, to_go=True)
