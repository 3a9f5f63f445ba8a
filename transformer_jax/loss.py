"""Label-smoothed cross entropy as a sum and a count, so that it adds over devices and pieces."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def token_loss(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], smoothing: float = 0.0
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Sum over the target tokens (id above 0) of their loss in nats, and their number.

    A token's loss is the cross entropy with (1 - smoothing) on the target and smoothing / V on
    every id (Szegedy et al. 2016; section 5.4).
    """
    return jnp.sum(token_losses(logits, targets, smoothing)), jnp.sum(targets > 0)


def token_losses(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], smoothing: float = 0.0
) -> Float[Array, "B T"]:
    """The loss of each target token in nats; 0 at padding."""
    logits = logits.astype(jnp.float32)
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    expected = (1 - smoothing) * target
    if smoothing:
        expected += smoothing * jnp.mean(logits, axis=-1)
    return jnp.where(targets > 0, normaliser - expected, 0)


def reinforce(
    log_probability: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    reward: Float[Array, "B T"],
    baseline: Float[Array, ""],
    real: Bool[Array, "B T"],
    *,
    ahead: bool,
) -> Float[Array, ""]:
    """0, with the gradient that trains sampled choices: that of
    -Σ ((reward - baseline) · log_probability + entropy) over the `real` target tokens.

    Both come weighted from the kind of attention (`Choices`). The rewards, of which there is no
    gradient, are those of the token itself, or with `ahead` those of the tokens from it on, each
    less the baseline: a choice in a layer that others follow changes later tokens too. (Williams
    1992; Xu et al. 2015, section 4.1)
    """
    gain = jax.lax.stop_gradient(jnp.where(real, reward - baseline, 0))
    if ahead:
        gain = jnp.cumsum(gain[:, ::-1], axis=1)[:, ::-1]
    total = -jnp.sum(jnp.where(real, gain * log_probability + entropy, 0))
    return total - jax.lax.stop_gradient(total)
