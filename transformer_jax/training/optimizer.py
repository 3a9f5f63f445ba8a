"""Builds the optimizer, an Optax chain."""

from __future__ import annotations

from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from transformer_jax.config import OptimizerConfig
from transformer_jax.training.schedules import learning_rate
from transformer_jax.types import Params

MUON_MOMENTUM = 0.95
"""Decay of Muon's moment, as its authors set it."""

MUON_RMS = 0.2
"""Root mean square of Muon's updates over the learning rate: about that of Adam's, so that one
learning rate suits both (Liu et al. 2025, section 2.2)."""


def make_optimizer(config: OptimizerConfig, d_model: int) -> optax.GradientTransformation:
    """Returns clipping by global norm, then Adam or Muon with decoupled weight decay.

    Adam (Kingma and Ba 2015; Loshchilov and Hutter 2019) decays matrices. Muon (Jordan et al. 2024;
    Liu et al. 2025) updates the matrices of dense layers, and decays these; Adam with Nesterov's
    momentum (Dozat 2016) updates the rest. UserError: as `find_schedule`.
    """
    clip = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    rate = learning_rate(config, d_model)
    if config.kind == "muon":
        optimizer = optax.contrib.muon(
            rate,
            beta=MUON_MOMENTUM,
            eps=config.eps,
            weight_decay=config.weight_decay,
            adam_b1=config.b1,
            adam_b2=config.b2,
            muon_weight_dimension_numbers=_dimensions,
            consistent_rms=MUON_RMS,
        )
    else:
        optimizer = optax.adamw(
            rate,
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=_matrices,
        )
    return optax.chain(*clip, optimizer)


def _matrices(params: Params) -> Params:
    """Returns True for matrices and False for biases, of several heads too, and norm scales."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key not in ("bias", "scale", "output_bias"), params
    )


def _dimensions(params: Any) -> Any:
    """Returns the input and output dimensions of each dense layer's matrix, None for the rest."""

    def of(path: Any, leaf: jax.Array) -> MuonDimensionNumbers | None:
        if path[-1].key != "kernel":
            return None
        # The output projection of attention is [N, H, D], the other three are [D, N, H].
        inputs = leaf.ndim - 1 if path[-2].key == "out" else 1
        return MuonDimensionNumbers(tuple(range(inputs)), tuple(range(inputs, leaf.ndim)))

    return jax.tree_util.tree_map_with_path(of, params)
