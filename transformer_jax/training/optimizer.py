"""Builds the optimizer, an Optax chain. To add one, write its builder and its entry in
`OPTIMIZERS`."""

from collections.abc import Callable

import optax
from optax.contrib import MuonDimensionNumbers

from transformer_jax.config import Config, OptimizerConfig, look_up
from transformer_jax.models import parameter_paths
from transformer_jax.models.parameter_paths import map_with_paths
from transformer_jax.training.schedules import learning_rate
from transformer_jax.types import HostOrDeviceArray, Params

MUON_MOMENTUM = 0.95
"""Decay of Muon's moment, as its authors set it."""

MUON_ITERATIONS = ((3.4445, -4.7750, 2.0315),) * 5
"""Coefficients of each Newton-Schulz iteration, those of its authors. Given one by one, they make
Optax loop over the iterations, which it otherwise unrolls for each matrix: steps compile faster."""

MUON_RMS = 0.2
"""Root mean square of Muon's updates over the learning rate: about that of Adam's, so that one
learning rate suits both (Liu et al. 2025, section 2.2)."""

Builder = Callable[[OptimizerConfig, optax.Schedule, Params], optax.GradientTransformation]
"""(config, learning rate by update, parameters or their shapes) -> an optimizer with that rate."""


def adam(
    config: OptimizerConfig, rate: optax.Schedule, params: Params
) -> optax.GradientTransformation:
    """Returns Adam (Kingma and Ba 2015) with decoupled decay of matrices (Loshchilov and Hutter
    2019)."""
    matrices = map_with_paths(lambda path, _: parameter_paths.is_matrix(path), params)
    decay = {"weight_decay": config.weight_decay, "mask": matrices}
    return optax.adamw(rate, config.b1, config.b2, config.eps, **decay)


def muon(
    config: OptimizerConfig, rate: optax.Schedule, params: Params
) -> optax.GradientTransformation:
    """Returns Muon (Jordan et al. 2024; Liu et al. 2025), which updates and decays the matrices of
    dense layers, and Adam with Nesterov's momentum (Dozat 2016) for the other parameters."""

    def dimensions(path: str, leaf: HostOrDeviceArray) -> MuonDimensionNumbers | None:
        inputs = parameter_paths.input_dimensions(path, leaf.ndim)
        if not parameter_paths.is_dense(path) or inputs is None:
            return None
        return MuonDimensionNumbers(inputs, tuple(range(len(inputs), leaf.ndim)))

    return optax.contrib.muon(
        rate,
        ns_coeffs=MUON_ITERATIONS,
        beta=MUON_MOMENTUM,
        eps=config.eps,
        weight_decay=config.weight_decay,
        adam_b1=config.b1,
        adam_b2=config.b2,
        muon_weight_dimension_numbers=map_with_paths(dimensions, params),
        consistent_rms=MUON_RMS,
    )


OPTIMIZERS: dict[str, Builder] = {"adam": adam, "muon": muon}
"""Builders of optimizers by their name in the config."""


def find_optimizer(config: OptimizerConfig) -> Builder:
    """Returns the builder of the config's optimizer. UserError: it is unknown."""
    return look_up(OPTIMIZERS, config.kind, "optimizer.kind")


def make_optimizer(config: Config, params: Params) -> optax.GradientTransformation:
    """Returns clipping by global norm, and then the config's optimizer.

    params: the parameters to train, or their shapes. UserError: as `find_optimizer` and
    `find_schedule`.
    """
    options = config.optimizer
    clip = [] if options.clip_norm is None else [optax.clip_by_global_norm(options.clip_norm)]
    rate = learning_rate(options, config.model.d_model)
    return optax.chain(*clip, find_optimizer(options)(options, rate, params))
