"""Measures the noise of the gradients from which sampled choices of attention learn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from transformer_jax.models.transformer import Transformer
from transformer_jax.runs import checkpoint
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import PAD
from transformer_jax.training.step import loss_fn
from transformer_jax.types import Batch, Params


def gradient_noise(trained: Run, batch: Batch, baseline: float, samples: int) -> dict[str, float]:
    """Returns the variance and the squared mean of the gradient with respect to the projections.

    The gradient is of the loss per token, with respect to the query's and key's projections of the
    one layer that samples, at the trained parameters and on one batch. Rewards have weight 1;
    dropout and the entropy bonus are off, so that nothing else is random. `variance` is the trace
    of the covariance. `squared_mean` is the squared norm of the mean of `samples` gradients less
    variance / samples, its bias; where it is not well above that, the mean is indistinguishable
    from 0.
    """
    chosen = replace(trained.config.model.cross_attention, entropy=0.0, reward=1.0)
    config = replace(trained.config.model, dropout=0.0, cross_attention=chosen)
    model = Transformer(config, *trained.tokenizers.sizes)
    weights = trained.params()
    averages = {"log_likelihood": jnp.float32(baseline)}

    @jax.jit
    def sample(key: jax.Array, weights: Params, batch: Batch) -> jax.Array:
        gradient: Any = jax.grad(loss_fn(model, 0.0), has_aux=True)(weights, batch, key, averages)[
            0
        ]
        layer = gradient["decoder"][f"layers_{chosen.layer}"]["cross_attention"]
        tokens = jnp.sum(batch.target_out != PAD)
        return ravel_pytree((layer["query"], layer["key"]))[0] / tokens

    keys = jax.random.split(jax.random.key(0), samples)
    drawn = np.stack([np.asarray(sample(key, weights, batch), np.float64) for key in keys])
    mean = drawn.mean(axis=0)
    variance = float(np.sum(np.square(drawn - mean)) / (samples - 1))
    return {"variance": variance, "squared_mean": float(mean @ mean) - variance / samples}


def compare(hard: Run, gumbel: Run, batch: Batch, samples: int = 256) -> dict[str, Any]:
    """Returns the noise of REINFORCE with the trained baseline and without one, and of gumbel.

    The baseline is the running mean of a token's log-likelihood in nats. It does not change the
    mean of the gradient. A batch n times as large divides the variance by n.
    """
    training = checkpoint.restore(hard.checkpoints, hard.best_step(), "training")
    baseline = float(training["averages"]["log_likelihood"])
    return {
        "samples": samples,
        "baseline": baseline,
        "hard": gradient_noise(hard, batch, baseline, samples),
        "hard, baseline 0": gradient_noise(hard, batch, 0.0, samples),
        "gumbel": gradient_noise(gumbel, batch, 0.0, samples),
    }
