"""Label-smoothed cross entropy and auxiliary losses, as sums.

Sums and counts add over devices and microbatches; means do not.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.special_ids import PAD
from transformer_jax.types import Mean, ModelOutput, Outcome


def token_loss(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], smoothing: float = 0.0
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Returns the sum of the losses of the target tokens in nats, and the number of tokens.

    A token's loss is the cross entropy with (1 - smoothing) on the target and smoothing / V on
    every id (Szegedy et al. 2016; section 5.4). Padding does not count.
    """
    return jnp.sum(token_losses(logits, targets, smoothing)), jnp.sum(targets != PAD)


def token_losses(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], smoothing: float = 0.0
) -> Float[Array, "B T"]:
    """Returns the loss of each target token in nats; 0 at padding."""
    logits = logits.astype(jnp.float32)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    expected = (1 - smoothing) * target
    if smoothing:
        expected += smoothing * jnp.mean(logits, axis=-1)
    return jnp.where(targets != PAD, normalizer - expected, 0)


def symmetric_divergence(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"]
) -> Float[Array, ""]:
    """Returns the sum over target tokens of D(p, q) + D(q, p) in nats, where p and q are predicted
    by adjacent rows, 2i and 2i + 1, and D is the Kullback-Leibler divergence.

    (Liang et al. 2021, formula 2, doubled). The targets of adjacent rows are equal.
    """
    log_p, log_q = (jax.nn.log_softmax(logits[i::2].astype(jnp.float32)) for i in range(2))
    both = jnp.sum((jnp.exp(log_p) - jnp.exp(log_q)) * (log_p - log_q), axis=-1)
    return jnp.sum(jnp.where(targets[::2] != PAD, both, 0))


def auxiliary_losses(
    output: ModelOutput, targets: Int[Array, "B T"], averages: dict[str, Array]
) -> tuple[Float[Array, ""], dict[str, Mean]]:
    """Returns the sum of the auxiliary losses of the model's layers, and the metrics they need.

    The metric is `log_likelihood`, the mean over the target tokens, in nats and without smoothing;
    its running mean is in `averages`. Without auxiliary losses the sum is 0, and there is no
    metric.
    """
    if not output.losses:
        return jnp.zeros(()), {}
    is_token = targets != PAD
    log_likelihood = -token_losses(output.logits, targets)
    outcome = Outcome(log_likelihood, is_token, averages)
    total = sum((loss(outcome) for loss in output.losses.values()), jnp.zeros(()))
    weight = jnp.sum(is_token).astype(jnp.float32)
    return total, {"log_likelihood": Mean(jnp.sum(log_likelihood), weight)}
