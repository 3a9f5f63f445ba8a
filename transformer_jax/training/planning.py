"""Plans training: the operations of a step, its memory on each device, and what makes it need less.

Both are counted from the step's jaxpr, without compiling it.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jax.extend.core import Var
from jax.sharding import AbstractMesh, NamedSharding

from transformer_jax.config import Config, MeshConfig
from transformer_jax.data.buckets import ROWS_MULTIPLE, Shape
from transformer_jax.flops import count_matmuls
from transformer_jax.models.parameter_paths import split
from transformer_jax.models.transformer import Model
from transformer_jax.parallel import mesh as meshes
from transformer_jax.parallel.devices import find_accelerator, usable_host_memory
from transformer_jax.parallel.parameters import with_shardings
from transformer_jax.training.setup import Setup, StepSetup, abstract_batch, prepare_step
from transformer_jax.training.step import train_only
from transformer_jax.types import Batch, Size, unconstrained


class StepCosts:
    """What a training step costs, as a function of the shape of its batch.

    The step is traced once, with symbolic sizes, or once for each shape where the model compares
    sizes or scans positions. Attention is that of the kernel `reference`, whose operations can be
    counted: it computes the scores of all pairs of positions, as is usual where the utilization of
    devices is reported. The costs do not depend on how `setup` is executed; remat is as in
    `ExecutionConfig`.
    """

    def __init__(self, setup: StepSetup) -> None:
        self._trace = cache(partial(_trace, setup))
        self._layers = sum(setup.config.model.depths)
        self._symbolic = True

    def _at(self, shape: Shape, remat: str) -> list[int]:
        """Returns the operations, the bytes kept for the backward pass, and those of them that the
        mesh axis `tensor` splits."""
        try:
            sizes = self._trace(remat, None if self._symbolic else shape)
        except (jax.errors.InconclusiveDimensionOperation, NotImplementedError):
            self._symbolic = False  # such as min(8, length) in a kind, or an associative scan
            sizes = self._trace(remat, shape)
        return [_evaluate(size, shape) for size in sizes]

    def flops(self, shape: Shape, remat: str = "none") -> int:
        """Returns the operations of the matmuls of a step, over all devices.

        With `remat`, those that are computed twice count twice.
        """
        return self._at(shape, remat)[0]

    def saved_bytes(self, shape: Shape, remat: str = "none", tensor: int = 1) -> int:
        """Returns the bytes of the activations that the backward pass needs, over all devices that
        have rows of their own. Each of these rows is on `tensor` devices."""
        sizes = (self._at(shape, x) for x in (remat, "none"))
        saved, whole = (kept - split + split // tensor for _, kept, split in sizes)
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


def _trace(setup: StepSetup, remat: str, shape: Shape | None) -> tuple[Size, Size, Size]:
    """Returns the operations of the matmuls, the bytes kept for the backward pass, and those of
    them that the mesh axis `tensor` splits, of batches of a shape; None: of any shape, as functions
    of its sizes."""
    config, state = setup.config, setup.abstract_state
    alone = {"kernel": "reference", "constrain": unconstrained, "shards": 1}
    loss = replace(setup, model=setup.model.clone(**alone, remat=remat)).loss

    def traced(params: Any, batch: Batch, key: Any, averages: Any) -> Any:
        frozen, trained = split(params, config.optimizer.frozen)
        part = train_only(loss, frozen)
        _, backward, _ = jax.vjp(lambda p: part(p, batch, key, averages), trained, has_aux=True)
        return backward, backward(jnp.ones(()))

    batch = abstract_batch(shape or _symbolic_shape(config.model.labels), config.data.packing)
    trace = jax.make_jaxpr(traced, return_shape=True)
    closed, (backward, _) = trace(state.params, batch, jax.random.key(0), state.averages)
    kept = closed.jaxpr.outvars[: len(jax.tree.leaves(backward))]
    residuals: set[Any] = {x for x in kept if isinstance(x, Var)} - {*closed.jaxpr.invars}
    saved = {x: math.prod(x.aval.shape) * x.aval.dtype.itemsize for x in residuals}
    split_bytes = sum(n for x, n in saved.items() if _is_split(x.aval.shape, setup.model))
    return count_matmuls(closed.jaxpr), sum(saved.values()), split_bytes


def _is_split(shape: Sequence[Size], model: Model) -> bool:
    """Returns whether `tensor` splits an activation: [B, N, ...], or one of d_ff or the logits."""
    config = model.config
    wide = shape[-1:] in ((config.d_ff,), (model.target_vocabulary,))
    return wide or (len(shape) > 3 and shape[1] in (config.heads, config.kv_heads))


def _symbolic_shape(labels: int | None) -> Shape:
    constraints = [] if labels is None else [f"target <= {labels + 1}"]
    sizes: Any = export.symbolic_shape("rows, source, target", constraints=constraints)
    return Shape(*sizes)


def _evaluate(polynomial: Any, shape: Shape) -> int:
    """Returns the value of a symbolic size, such as "6*rows*source + 2*rows^2"."""
    sizes = shape._asdict()

    def power(text: str) -> int:
        base, _, exponent = text.partition("^")
        return (sizes[base] if base in sizes else int(base)) ** int(exponent or 1)

    terms = re.split(r" \+ ", str(polynomial).replace(" - ", " + -1*"))
    return sum(math.prod(map(power, term.split("*"))) for term in terms)


class Memory(NamedTuple):
    """Bytes on each device."""

    params: int
    rest: int  # of the training state: the optimizer's, and the moving average of the parameters
    batch: int
    temporaries: int


class Planner:
    """Plans the steps of a checked config, and of its variants.

    vocabularies: the numbers of source and target ids. devices: their number, which need not be
    here; or the devices; None: those here. like: the planner of a config with the same model and
    optimizer state, which are not traced again. UserError: as `prepare_step`.
    """

    def __init__(
        self,
        config: Config,
        vocabularies: tuple[int, int],
        devices: int | list[Any] | None = None,
        like: Planner | None = None,
    ) -> None:
        self.config, self._vocabularies, self._devices = config, vocabularies, devices
        if isinstance(devices, int):
            mesh: meshes.AnyMesh = meshes.make_abstract_mesh(config.mesh, devices)
        else:
            mesh = meshes.make_mesh(config.mesh, devices)
        self.setup = prepare_step(config, vocabularies, mesh)
        self._costs = like._costs if like else StepCosts(self.setup)
        state = like._state if like else self.setup.abstract_state
        self._state = with_shardings(state, self.setup.mesh)
        self._params_bytes, self._state_bytes = _bytes(self._state.params), _bytes(self._state)
        self._gradient_bytes = _bytes(split(self._state.params, config.optimizer.frozen)[1])

    @cached_property
    def _gathered_bytes(self) -> int:
        """The bytes of the parameters on each device without the axis `fsdp`."""
        tensor = self.setup.mesh.shape[meshes.TENSOR]
        group = meshes.make_abstract_mesh(MeshConfig(tensor=tensor), tensor)
        return _bytes(with_shardings(self._state.params, group))

    def shape(self, shape: Shape) -> Shape:
        """Returns the shape of a batch with the empty rows that the devices need."""
        rows = meshes.data_parallel_size(self.setup.mesh) * self.setup.microbatches
        return shape.padded(rows)

    def flops(self, shape: Shape) -> int:
        """Returns the operations of the matmuls of a step, over all devices."""
        return self._costs.flops(self.shape(shape), self.config.execution.remat)

    def memory(self, shape: Shape) -> Memory:
        """Returns the memory of a step. Its temporaries are estimated; the rest is exact.

        The estimate is what the forward pass keeps, the gradients of the parameters (with
        microbatches, those of one and their sum) and of the logits, and the parameters that `fsdp`
        gathers. XLA fuses some of it away, and needs more buffers.
        """
        shape, mesh, params = self.shape(shape), self.setup.mesh, self._params_bytes
        tensor = mesh.shape[meshes.TENSOR]
        batch = abstract_batch(shape, self.config.data.packing)
        shards, microbatches = meshes.data_parallel_size(mesh), self.setup.microbatches
        rows = shape.rows * (2 if self.config.optimizer.r_drop else 1)
        logits = rows * shape.target * self._vocabularies[1] * 4 // tensor
        kept = self._costs.saved_bytes(shape, self.config.execution.remat, tensor) + logits
        gradients = self._gradient_bytes * min(microbatches, 2)
        temporaries = kept // (shards * microbatches) + gradients
        if mesh.shape[meshes.FSDP] > 1:
            temporaries += self._gathered_bytes
        rest = self._state_bytes - params
        return Memory(params, rest, _bytes(batch) // shards, temporaries)

    def compiled(self, shape: Shape) -> tuple[Memory, float]:
        """Compiles the gradient of a step. Returns the memory of the step, and the seconds that
        compilation took."""
        began = time.monotonic()
        program = compile_gradients(self.setup, self.shape(shape))
        memory = self.memory(shape)._replace(temporaries=temporary_bytes(program))
        return memory, time.monotonic() - began

    def variant(self, section: str, **changes: Any) -> Planner:
        """Returns the planner of the config with fields of one section changed."""
        config = self.config.changed(**{section: changes})
        return Planner(config, self._vocabularies, self._devices, self)


class Remedy(NamedTuple):
    """A change of the config with which a step needs less memory."""

    option: str  # as it is given on the command line
    memory: int  # bytes on each device
    operations: float  # of the step, as a multiple of those without the remedy


def remedies(
    planner: Planner, shapes: Sequence[Shape], limit: int, compiles: bool = False
) -> Iterator[Remedy]:
    """Yields changes with which a step of any shape needs at most `limit` bytes on each device.

    The cheapest come first: more microbatches and sharding cost little time, rematerialization up
    to a third more, and smaller batches make it another training. compiles: whether to compile what
    fits by the estimate.
    """
    flops = sum(map(planner.flops, shapes))
    for section, field, values in _families(planner.config, planner.setup.mesh.size):
        for value in values:
            changed = planner.variant(section, **{field: value})
            share = changed.config.data.batch_tokens / planner.config.data.batch_tokens
            smaller = [_with_rows(shape, share) for shape in shapes]
            if not all(shape.rows for shape in smaller):
                break
            needed, largest = max((sum(changed.memory(shape)), shape) for shape in smaller)
            if compiles and needed <= limit:
                needed = sum(changed.compiled(largest)[0])
            if needed <= limit:
                more = sum(map(changed.flops, smaller)) / flops
                yield Remedy(f"--config.{section}.{field}={value}", needed, more)
                break


def _families(config: Config, devices: int) -> Iterator[tuple[str, str, list[Any]]]:
    """Yields the section and the field of each kind of change, and values, the nearest first."""
    powers, mesh, options = [2, 4, 8, 16, 32], config.mesh, config.optimizer
    if options.microbatch_tokens is None:
        yield "optimizer", "accumulate", [options.accumulate * n for n in powers]
    else:
        tokens = [max(options.microbatch_tokens // n, 1) for n in powers]
        yield "optimizer", "microbatch_tokens", tokens
    if mesh.data == -1 and config.execution.executor == "jit":
        sizes = [mesh.fsdp * n for n in (*powers, 64, 128, 256)]
        yield "mesh", "fsdp", [n for n in sizes if devices % (n * mesh.tensor) == 0]
    remats = ["none", "matmuls", "layers"]
    yield "execution", "remat", remats[remats.index(config.execution.remat) + 1 :]
    yield "data", "batch_tokens", [config.data.batch_tokens // n for n in powers]


def _with_rows(shape: Shape, share: float) -> Shape:
    """Returns the shape with a share of its rows, which are a multiple of `ROWS_MULTIPLE`."""
    return shape._replace(rows=int(shape.rows * share) // ROWS_MULTIPLE * ROWS_MULTIPLE)


def device_memory(mesh: meshes.AnyMesh) -> int:
    """Returns the bytes that training may use on each device of the mesh.

    Devices that are not here are taken to be of the kind of those here. Emulated host devices share
    what is free in the system and in the container.
    """
    abstract = isinstance(mesh, AbstractMesh)
    device = jax.devices()[0] if abstract else mesh.devices.flat[0]
    if device.platform == "cpu":
        return usable_host_memory() // mesh.size
    if device in jax.devices() and (stats := device.memory_stats()):
        return stats["bytes_limit"]
    accelerator = find_accelerator(device.device_kind)
    return (accelerator.memory_gib or 0) * 2**30 if accelerator else 0


def temporary_bytes(program: Any) -> int:
    """Returns the bytes on each device of the temporaries of a gradient, and of the gradient."""
    analysis = program.memory_analysis()
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes


def compile_gradients(setup: StepSetup, shape: Shape) -> Any:
    """Returns the program that computes the gradient of batches of this shape: the largest part of
    a training step, and the one that depends on the shape."""

    def placed(names: tuple[str, ...], x: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(setup.mesh, meshes.partition(names))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    batch = abstract_batch(shape, setup.config.data.packing)
    batch = jax.tree.map(partial(placed, ("batch",)), batch)
    key = placed((), jax.eval_shape(jax.random.key, 0))
    return setup.compile_gradients().lower(setup.abstract_state, batch, key).compile()


def _bytes(tree: Any) -> int:
    """Returns the bytes of a tree on each device, or in all if it has no shardings."""

    def size(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
        return math.prod(shape) * jnp.dtype(leaf.dtype).itemsize

    return sum(map(size, jax.tree.leaves(tree)))
