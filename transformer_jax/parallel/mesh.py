"""Makes the device mesh, and shards arrays over it by the logical names of their dimensions.

The mesh has three axes. The rows of a batch are split over "data" and "fsdp". Parameters and
optimizer state are split over "fsdp", and by their names over "tensor"; "data" holds copies.
"""

import itertools
import math
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.experimental import mesh_utils, topologies
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from transformer_jax.config import DATA_PARALLEL, Config, MeshConfig
from transformer_jax.data.loader import Shard
from transformer_jax.errors import UserError
from transformer_jax.parallel.processes import gather, this_process
from transformer_jax.types import Constrain, unconstrained

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
AXES = (DATA, FSDP, TENSOR)
"""The axes of the mesh. Devices that are neighbors differ in the last one."""

_AUTO = (AxisType.Auto,) * len(AXES)

MESH_AXES: dict[str, str | tuple[str, ...] | None] = {
    "batch": (DATA, FSDP),
    "length": None,
    "d_model": None,
    "heads": TENSOR,
    "head_size": None,
    "state": TENSOR,
    "d_ff": TENSOR,
    "vocabulary": TENSOR,
}
"""The mesh axes over which each logical dimension is split; None: over none. The dimensions of
parameters are named in `models/parameter_paths.py`, and those of activations in the models."""


AnyMesh = Mesh | AbstractMesh
"""A mesh of devices, or of devices that are not here, for plans."""


def make_abstract_mesh(config: MeshConfig, devices: int) -> AbstractMesh:
    """Returns a mesh over devices that are not here. UserError: their number does not fit."""
    return AbstractMesh(mesh_shape(config, devices), AXES, axis_types=_AUTO)


def make_mesh(config: MeshConfig = DATA_PARALLEL, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns a mesh over `devices`; None: all devices. UserError: their number does not fit."""
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(config, len(devices))
    # jax.make_mesh does not split the axes of a TPU's torus between axes of the mesh.
    grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=_AUTO)


def topology_devices(name: str) -> list[Any]:
    """Returns the devices of a TPU slice, such as "v5e:4x4", to compile for without having them.

    UserError: there is no such slice, or the compiler for TPUs is not installed.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # which asks a server of Google's cloud
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"topology {name}: {str(error).splitlines()[0]}; name a slice such as v5e:2x4, and "
            "install the compiler with pip install 'transformer-jax[tpu]'"
        ) from error
    return list(topology.devices)


def mesh_shape(config: MeshConfig, devices: int) -> tuple[int, int, int]:
    """Returns the sizes of the axes for this number of devices.

    UserError: their product is another number; the message names the nearest mesh that fits.
    """
    data, fsdp, tensor = config.data, config.fsdp, config.tensor
    if data == -1:
        data = max(devices // (fsdp * tensor), 1)
    if data * fsdp * tensor == devices:
        return data, fsdp, tensor

    def distance(shape: tuple[int, ...]) -> float:
        return sum(abs(math.log(a / b)) for a, b in zip(shape, (data, fsdp, tensor), strict=True))

    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    shapes = [s for s in itertools.product(divisors, repeat=3) if math.prod(s) == devices]
    nearest = min(shapes, key=distance)
    asked = f"mesh.data={config.data}, mesh.fsdp={fsdp}, mesh.tensor={tensor}"
    count = f"a multiple of {fsdp * tensor}" if config.data == -1 else data * fsdp * tensor
    fits = " ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, nearest, strict=True))
    raise UserError(
        f"{asked}: needs {count} devices, not {devices}; the nearest that fits is {fits}"
    )


def check_mesh(config: Config, vocabularies: Sequence[int] = ()) -> None:
    """Checks that the mesh can split the model, and vocabularies of these numbers of ids.

    UserError: it cannot; the message names the field.
    """
    model, tensor = config.model, config.mesh.tensor
    if config.execution.executor == "pmap" and (config.mesh.fsdp, tensor) != (1, 1):
        raise UserError(
            f"execution.executor='pmap': needs mesh.fsdp=1 and mesh.tensor=1, not "
            f"{config.mesh.fsdp} and {tensor}; use execution.executor=jit"
        )
    split = {"heads": model.heads, "d_ff": model.d_ff, "kv_heads": model.kv_heads or tensor}
    sizes = {f"model.{name}={size}": size for name, size in split.items()}
    sizes |= {f"the {n} ids of the vocabulary (tokenizer.vocabulary)": n for n in vocabularies}
    for what, size in sizes.items():
        if size % tensor:
            raise UserError(f"mesh.tensor={tensor}: must divide {what}")


def data_parallel_size(mesh: AnyMesh) -> int:
    """Returns the number of parts into which the rows of a batch are split."""
    return mesh.shape[DATA] * mesh.shape[FSDP]


def local_rows(mesh: Mesh) -> tuple[list[int], int]:
    """Returns which parts of a batch's rows this process holds, and the number of all parts.

    On TPU slices of several hosts, the parts of a host need not follow each other.
    """
    groups = mesh.devices.reshape(data_parallel_size(mesh), -1)
    here = jax.process_index()
    local = [i for i, group in enumerate(groups) if any(d.process_index == here for d in group)]
    return local, len(groups)


def local_shard(mesh: Mesh, microbatches: int = 1) -> Shard:
    """Returns which part of each batch this process makes, for `Loader`.

    microbatches: their number in a step; each has rows for all devices.
    """
    return Shard(data_parallel_size(mesh) * microbatches, local_rows(mesh), this_process(), gather)


def describe(mesh: AnyMesh) -> str:
    """Returns the number and the kind of the devices and the mesh, for a person."""
    kind = "devices" if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].device_kind
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    return f"{mesh.size} {kind}" + (f", mesh {axes}" if axes else "")


def partition(names: tuple[str | None, ...]) -> PartitionSpec:
    """Returns the `PartitionSpec` of an array whose dimensions have these logical names."""
    return PartitionSpec(*(None if name is None else MESH_AXES[name] for name in names))


def constrain_to(mesh: AnyMesh) -> Constrain:
    """Returns the `Constrain` that shards activations over `mesh` by the table `MESH_AXES`.

    On one device it does nothing: a constraint, even without effect, keeps XLA from fusing what is
    before it with what is after it.
    """
    if mesh.size == 1:
        return unconstrained

    def constrain(x: Array, names: tuple[str | None, ...]) -> Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition(names)))

    return constrain


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Returns `tree` replicated on every device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Returns a batch on the mesh, split by rows; `batch` holds the rows of this process."""
    sharding = NamedSharding(mesh, partition(("batch",)))
    return jax.tree.map(partial(jax.make_array_from_process_local_data, sharding), batch)


def take_local_rows(batch: Any, mesh: Mesh) -> Any:
    """Returns the rows of a whole batch that this process holds, for `shard_batch`."""
    local, count = local_rows(mesh)

    def take(x: Any) -> Any:
        return x.reshape(count, -1, *x.shape[1:])[local].reshape(-1, *x.shape[1:])

    return jax.tree.map(take, batch)
