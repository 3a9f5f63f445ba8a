"""Label-smoothed cross entropy as a sum and a count, so that it adds over devices and pieces."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def token_loss(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], smoothing: float = 0.0
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Sum over the target tokens (id above 0) of their loss in nats, and their number.

    A token's loss is the cross entropy with (1 - smoothing) on the target and smoothing / V on
    every id (Szegedy et al. 2016; section 5.4).
    """
    logits = logits.astype(jnp.float32)
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    expected = (1 - smoothing) * target
    if smoothing:
        expected += smoothing * jnp.mean(logits, axis=-1)
    weights = targets > 0
    return jnp.sum(jnp.where(weights, normaliser - expected, 0)), jnp.sum(weights)
