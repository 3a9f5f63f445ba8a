"""How noisy the gradients are from which sampled choices of attention learn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from transformer_jax import checkpoint
from transformer_jax.model import Transformer
from transformer_jax.prepare import loss_fn
from transformer_jax.run import Run
from transformer_jax.types import Batch, Params


def gradient_noise(made: Run, batch: Batch, baseline: float, samples: int) -> dict[str, float]:
    """How noisy the estimated gradient of the loss is that reaches what scores the keys.

    Of so many samples g of the gradient, a token, by the query's and key's projections of the one
    layer whose choices are sampled, at the trained weights and on one batch, with rewards of weight
    1, and without dropout and entropy bonus, so that nothing else is random: `variance`, the trace
    of the covariance of g; `squared_mean`, the squared norm of the mean less variance / samples, by
    which noise makes it too large; where it is not well above that, the mean is not told from 0.
    """
    chosen = replace(made.config.model.cross_attention, entropy=0.0, reward=1.0)
    config = replace(made.config.model, dropout=0.0, cross_attention=chosen)
    model = Transformer(config, made.tokenizers.source.size, made.tokenizers.target.size)
    weights = made.weights()
    extra = {"reward": jnp.float32(baseline)} if chosen.kind == "hard" else None

    @jax.jit
    def sample(key: jax.Array, weights: Params, batch: Batch) -> jax.Array:
        gradient: Any = jax.grad(loss_fn(model, 0.0), has_aux=True)(weights, batch, key, extra)[0]
        layer = gradient["decoder"][f"layers_{chosen.layer}"]["cross_attention"]
        tokens = jnp.sum(batch.target_out > 0)
        return ravel_pytree((layer["query"], layer["key"]))[0] / tokens

    keys = jax.random.split(jax.random.key(0), samples)
    drawn = np.stack([np.asarray(sample(key, weights, batch), np.float64) for key in keys])
    mean = drawn.mean(axis=0)
    variance = float(np.sum(np.square(drawn - mean)) / (samples - 1))
    return {"variance": variance, "squared_mean": float(mean @ mean) - variance / samples}


def compare(hard: Run, gumbel: Run, batch: Batch, samples: int = 256) -> dict[str, Any]:
    """The noise of REINFORCE, with the baseline of the trained run and with none, and of gumbel.

    A baseline, in nats the running mean of a token's log-likelihood, leaves the mean as it is. A
    batch n times as large divides the variance by n.
    """
    training = checkpoint.restore(hard.checkpoints, hard.best_step(), "training")
    baseline = float(training["extra"]["reward"])
    return {
        "samples": samples,
        "baseline": baseline,
        "hard": gradient_noise(hard, batch, baseline, samples),
        "hard, baseline 0": gradient_noise(hard, batch, 0.0, samples),
        "gumbel": gradient_noise(gumbel, batch, 0.0, samples),
    }
