"""Makes the device mesh, and shards arrays over it by the logical names of their dimensions.

A batch is split by rows over the axis "data"; everything else is replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from transformer_jax.types import Constrain

DATA = "data"
"""The mesh axis over which the rows of a batch are split."""

MESH_AXES: dict[str, str | None] = {
    "batch": DATA,
    "length": None,
    "heads": None,
    "d_ff": None,
    "vocabulary": None,
}
"""The mesh axis over which each logical dimension of an activation is split; None: over none."""


def make_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """Returns a mesh of one axis over `devices`; None: all devices."""
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh((len(devices),), (DATA,), devices=devices, axis_types=(AxisType.Auto,))


def data_parallel_size(mesh: Mesh) -> int:
    """Returns the number of parts into which the rows of a batch are split."""
    return mesh.shape[DATA]


def partition(names: tuple[str | None, ...]) -> PartitionSpec:
    """Returns the `PartitionSpec` of an array whose dimensions have these logical names."""
    return PartitionSpec(*(None if name is None else MESH_AXES[name] for name in names))


def constrain_to(mesh: Mesh) -> Constrain:
    """Returns the `Constrain` that shards activations over `mesh` by the table `MESH_AXES`."""

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
