"""Splits parameters, and the optimizer state of their shapes, over the mesh."""

from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.models.parameter_paths import dimension_names, map_with_paths
from transformer_jax.parallel.mesh import FSDP, AnyMesh, partition

MIN_SHARDED_SIZE = 2**14
"""Arrays of fewer elements are not split over the axis "fsdp": to gather them takes longer than
their memory is worth."""


def partition_tree(tree: Any, mesh: AnyMesh) -> Any:
    """Returns the `PartitionSpec` of each leaf of a tree that holds parameters.

    `tree` may be parameters, a training state or the state of an optimizer: its leaves are known by
    the ends of their paths. The axis "fsdp" splits the largest dimension of a leaf that it divides
    and that is not split over "tensor".
    """
    return map_with_paths(partial(_spec, mesh), tree)


def shard_tree(tree: Any, mesh: AnyMesh) -> Any:
    """Returns a tree that holds parameters, split over the mesh as `partition_tree` says."""
    return jax.device_put(tree, shardings(tree, mesh))


def shardings(tree: Any, mesh: AnyMesh) -> Any:
    """Returns the sharding of each leaf of a tree that holds parameters."""
    return map_with_paths(lambda path, leaf: NamedSharding(mesh, _spec(mesh, path, leaf)), tree)


def with_shardings(shapes: Any, mesh: AnyMesh) -> Any:
    """Returns a tree of shapes and types that holds parameters, with shardings."""
    return jax.tree.map(lambda leaf, to: leaf.update(sharding=to), shapes, shardings(shapes, mesh))


def _spec(mesh: AnyMesh, path: str, leaf: Any) -> PartitionSpec:
    names = dimension_names(path)
    # Optimizers may keep arrays of other shapes for a parameter.
    known = names if len(names) == leaf.ndim else (None,) * leaf.ndim
    axes: list[Any] = [axis if axis and mesh.shape[axis] > 1 else None for axis in partition(known)]
    size = mesh.shape[FSDP]
    free = [i for i, axis in enumerate(axes) if axis is None and leaf.shape[i] % size == 0]
    if size > 1 and leaf.size >= MIN_SHARDED_SIZE and free:
        axes[max(free, key=lambda i: leaf.shape[i])] = FSDP
    return PartitionSpec(*axes)
