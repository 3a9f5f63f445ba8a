"""Counts the operations and the memory of a training step from its jaxpr, without compiling it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.extend.core import Var

from transformer_jax.data.buckets import Shape
from transformer_jax.flops import count_matmuls
from transformer_jax.parallel.devices import find_accelerator
from transformer_jax.training.setup import Setup, StepSetup, empty_batch
from transformer_jax.types import Batch, Size, unconstrained


class StepCosts:
    """What a training step costs, as a function of the shape of its batch.

    The step is traced once, with symbolic sizes, or once for each shape where the model compares
    sizes. Attention is that of the kernel `reference`, whose operations can be counted: it computes
    the scores of all pairs of positions, as is usual where the utilization of devices is reported.
    The costs do not depend on how `setup` is executed; remat is as in `ExecutionConfig`.
    """

    def __init__(self, setup: StepSetup) -> None:
        self._trace = cache(partial(_trace, setup))
        self._layers = sum(setup.config.model.depths)
        self._symbolic = True

    def _at(self, shape: Shape, remat: str) -> tuple[int, int]:
        """Returns the operations, and the bytes kept for the backward pass."""
        try:
            sizes = self._trace(remat, None if self._symbolic else shape)
        except jax.errors.InconclusiveDimensionOperation:  # such as min(8, length) in a kind
            self._symbolic = False
            sizes = self._trace(remat, shape)
        return _evaluate(sizes[0], shape), _evaluate(sizes[1], shape)

    def flops(self, shape: Shape, remat: str = "none") -> int:
        """Returns the operations of the matmuls of a step, over all devices.

        With `remat`, those that are computed twice count twice.
        """
        return self._at(shape, remat)[0]

    def saved_bytes(self, shape: Shape, remat: str = "none") -> int:
        """Returns the bytes of the activations that the backward pass needs, over all devices."""
        saved, whole = (self._at(shape, x)[1] for x in (remat, "none"))
        # Those of one layer at a time are computed again, and are then in memory, too.
        return saved + (whole - saved) // self._layers


def ideal_seconds_fn(setup: Setup) -> Callable[[Batch], float]:
    """Returns a function (batch) -> the seconds that the matmuls of a step take at the peak of all
    devices; 0 if the peak is unknown.

    Divided by the seconds that the step takes, they are the model FLOPs utilization (Chowdhery et
    al. 2022, appendix B), which does not count what is rematerialized.
    """
    execution = setup.config.execution
    accelerator = find_accelerator(setup.mesh.devices.flat[0].device_kind)
    tflops = execution.peak_tflops or (accelerator.tflops if accelerator else None)
    if tflops is None:
        return lambda batch: 0.0
    peak, costs = tflops * 1e12 * setup.mesh.size, StepCosts(setup)
    flops = cache(costs.flops)

    def ideal_seconds(batch: Batch) -> float:
        rows, source = batch.source.shape
        return flops(Shape(rows, source, batch.target_out.shape[1])) / peak

    return ideal_seconds


def _trace(setup: StepSetup, remat: str, shape: Shape | None) -> tuple[Size, Size]:
    """Returns the operations of the matmuls, and the bytes kept for the backward pass, of batches
    of a shape; None: of any shape, as functions of its sizes."""
    config, state = setup.config, setup.abstract_state
    alone = {"kernel": "reference", "constrain": unconstrained, "shards": 1}
    loss = replace(setup, model=setup.model.clone(**alone, remat=remat)).loss

    def traced(params: Any, batch: Batch, key: Any, averages: Any) -> Any:
        _, backward, _ = jax.vjp(
            lambda params: loss(params, batch, key, averages), params, has_aux=True
        )
        return backward, backward(jnp.ones(()))

    packed = config.data.packing
    batch = empty_batch(shape, packed) if shape else _symbolic_batch(packed, config.model.labels)
    trace = jax.make_jaxpr(traced, return_shape=True)
    closed, (backward, _) = trace(state.params, batch, jax.random.key(0), state.averages)
    kept = closed.jaxpr.outvars[: len(jax.tree.leaves(backward))]
    residuals: set[Any] = {x for x in kept if isinstance(x, Var)} - {*closed.jaxpr.invars}
    saved = sum(math.prod(x.aval.shape) * x.aval.dtype.itemsize for x in residuals)
    return count_matmuls(closed.jaxpr), saved


def _symbolic_batch(packed: bool, labels: int | None) -> Batch:
    constraints = [] if labels is None else [f"target <= {labels + 1}"]
    rows, source, target = export.symbolic_shape("rows, source, target", constraints=constraints)
    sources = jax.ShapeDtypeStruct((rows, source), jnp.int32)
    targets = jax.ShapeDtypeStruct((rows, target), jnp.int32)
    more = (sources, sources, targets, targets) if packed else ()
    return Batch(sources, targets, targets, *more)


def _evaluate(polynomial: Any, shape: Shape) -> int:
    """Returns the value of a symbolic size, such as "6*rows*source + 2*rows^2"."""
    sizes = shape._asdict()

    def power(text: str) -> int:
        base, _, exponent = text.partition("^")
        return (sizes[base] if base in sizes else int(base)) ** int(exponent or 1)

    terms = re.split(r" \+ ", str(polynomial).replace(" - ", " + -1*"))
    return sum(math.prod(map(power, term.split("*"))) for term in terms)
