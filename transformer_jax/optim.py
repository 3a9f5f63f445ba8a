"""Learning-rate schedules and the one optax chain."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from transformer_jax.config import OptimizerConfig
from transformer_jax.types import Params


def schedule(config: OptimizerConfig, d_model: int) -> optax.Schedule:
    """Learning rate by update, counted from 0: linear warm-up to the peak, then down.

    `noam`: learning_rate · d_model^-0.5 · min(step^-0.5, step · warmup^-1.5) (section 5.3, eq. 3);
    `inverse_sqrt`: the same shape with learning_rate as the peak; `cosine` and `linear` reach 0 at
    decay_steps.
    """
    warmup = config.warmup
    peak = config.learning_rate
    if config.schedule == "noam":
        peak *= (d_model * warmup) ** -0.5

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(count, jnp.float32) + 1
        if config.schedule in ("noam", "inverse_sqrt"):
            down = jnp.sqrt(warmup / jnp.maximum(step, warmup))
        else:
            left = (step - warmup) / ((config.decay_steps or 0) - warmup)
            left = 1 - jnp.clip(left, 0, 1)
            down = left if config.schedule == "linear" else (1 - jnp.cos(jnp.pi * left)) / 2
        return peak * jnp.minimum(step / warmup, 1) * down

    return rate


def make_optimizer(config: OptimizerConfig, d_model: int) -> optax.GradientTransformation:
    """Clipping by global norm, Adam and decoupled weight decay on matrices (Loshchilov 2019)."""
    clip = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    adam = optax.adamw(
        schedule(config, d_model),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=_matrices,
    )
    return optax.chain(*clip, adam)


def _matrices(params: Params) -> Params:
    """True for weight matrices; norms and biases (of several heads too) are left alone."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key not in ("bias", "scale", "output_bias"), params
    )
