"""Builds the optimizer, an Optax chain."""

from __future__ import annotations

import jax
import optax

from transformer_jax.config import OptimizerConfig
from transformer_jax.training.schedules import learning_rate
from transformer_jax.types import Params


def make_optimizer(config: OptimizerConfig, d_model: int) -> optax.GradientTransformation:
    """Returns clipping by global norm, then Adam with decoupled weight decay on matrices.

    (Kingma and Ba 2015; Loshchilov and Hutter 2019.) UserError: as `find_schedule`.
    """
    clip = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    adam = optax.adamw(
        learning_rate(config, d_model),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=_matrices,
    )
    return optax.chain(*clip, adam)


def _matrices(params: Params) -> Params:
    """Returns True for matrices and False for biases, of several heads too, and norm scales."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key not in ("bias", "scale", "output_bias"), params
    )
