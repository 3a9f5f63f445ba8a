"""Splits parameters, and the optimizer state of their shapes, over the mesh."""

from __future__ import annotations

from functools import cache, partial
from pathlib import PurePosixPath
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.parallel.mesh import FSDP, MESH_AXES, AnyMesh

DIMENSIONS: dict[str, tuple[str, ...]] = {
    "*_embedding/embedding": ("vocabulary", "d_model"),
    "output": ("vocabulary", "d_model"),
    "output_bias": ("vocabulary",),
    "*_attention/query/kernel": ("d_model", "heads", "head_size"),
    "*_attention/query/bias": ("heads", "head_size"),
    "*_attention/key/kernel": ("d_model", "heads", "head_size"),
    "*_attention/key/bias": ("heads", "head_size"),
    "*_attention/value/kernel": ("d_model", "heads", "head_size"),
    "*_attention/value/bias": ("heads", "head_size"),
    "*_attention/out/kernel": ("heads", "head_size", "d_model"),
    "ffn/in/kernel": ("d_model", "d_ff"),
    "ffn/in/bias": ("d_ff",),
    "ffn/gate/kernel": ("d_model", "d_ff"),
    "ffn/gate/bias": ("d_ff",),
    "ffn/out/kernel": ("d_ff", "d_model"),
}
"""The logical names of the dimensions of parameters, by the end of their paths. Parameters that are
not listed are split over the axis "fsdp" only."""

MIN_SHARDED_SIZE = 2**14
"""Arrays of fewer elements are not split over the axis "fsdp": to gather them takes longer than
their memory is worth."""


def partition_tree(tree: Any, mesh: AnyMesh) -> Any:
    """Returns the `PartitionSpec` of each leaf of a tree that holds parameters.

    `tree` may be parameters, a training state or the state of an optimizer: its leaves are known by
    the ends of their paths. The axis "fsdp" splits the largest dimension of a leaf that it divides
    and that is not split over "tensor".
    """
    return jax.tree_util.tree_map_with_path(partial(_spec, mesh), tree)


def shard_tree(tree: Any, mesh: AnyMesh) -> Any:
    """Returns a tree that holds parameters, split over the mesh as `partition_tree` says."""
    return jax.device_put(tree, shardings(tree, mesh))


def shardings(tree: Any, mesh: AnyMesh) -> Any:
    """Returns the sharding of each leaf of a tree that holds parameters."""

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, _spec(mesh, path, leaf))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def with_shardings(shapes: Any, mesh: AnyMesh) -> Any:
    """Returns a tree of shapes and types that holds parameters, with shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings(shapes, mesh),
    )


def _spec(mesh: AnyMesh, path: Any, leaf: Any) -> PartitionSpec:
    names = _dimensions(jax.tree_util.keystr(path, simple=True, separator="/"))
    # Optimizers may keep arrays of other shapes for a parameter.
    axes: list[Any] = [MESH_AXES[name] for name in names] if len(names) == leaf.ndim else []
    axes = axes or [None] * leaf.ndim
    axes = [axis if axis and mesh.shape[axis] > 1 else None for axis in axes]
    size = mesh.shape[FSDP]
    free = [i for i, axis in enumerate(axes) if axis is None and leaf.shape[i] % size == 0]
    if size > 1 and leaf.size >= MIN_SHARDED_SIZE and free:
        axes[max(free, key=lambda i: leaf.shape[i])] = FSDP
    return PartitionSpec(*axes)


@cache
def _dimensions(name: str) -> tuple[str, ...]:
    """Returns the names of the dimensions of the parameter with this path; none if not listed."""
    path = PurePosixPath(name)
    return next((names for end, names in DIMENSIONS.items() if path.match(end)), ())
