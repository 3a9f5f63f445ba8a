"""Fits a model, and its attention kernel, to the mesh on which it is trained."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from transformer_jax.attention.functional import ContextAndWeights
from transformer_jax.attention.kernels import FEATURES, AnyKernel, Kernel, attend, find_kernel
from transformer_jax.attention.masks import AnyMask
from transformer_jax.models.transformer import Model
from transformer_jax.parallel.mesh import MESH_AXES, AnyMesh, constrain_to, data_parallel_size


def shard_model(model: Model, mesh: AnyMesh) -> Model:
    """Returns the model with activations, attention and embeddings split over the mesh.

    The results are the same; without this, XLA may gather arrays that could stay split.
    """
    kernel, shards = shard_kernel(model.kernel, mesh), data_parallel_size(mesh)
    return model.clone(kernel=kernel, constrain=constrain_to(mesh), shards=shards)


def shard_kernel(kernel: AnyKernel, mesh: AnyMesh) -> AnyKernel:
    """Returns the kernel, mapped over the rows and the heads that the mesh splits (`shard_map`).

    Without this, XLA may gather the inputs of a kernel that it cannot split on every device. With
    dropout, XLA splits the kernel, since the mask depends on the index of an element among all.
    """
    if mesh.size == 1:
        return kernel
    features = frozenset(FEATURES) - {"weights"}
    entry = Kernel("auto", attend, features) if kernel == "auto" else find_kernel(kernel)
    has_weights = "weights" in entry.features

    def function(
        query: Array, key: Array, value: Array, mask: AnyMask, bias: Any = None, dropout: Any = None
    ) -> ContextAndWeights:
        def local(query: Array, key: Array, value: Array, mask: AnyMask, bias: Any) -> Any:
            result = attend(query, key, value, mask, bias=bias, kernel=kernel, dropout=dropout)
            return result if has_weights else result._replace(weights=None)

        arguments = (query, key, value, mask, bias)
        if dropout is None:
            specs = jax.tree.map(partial(_spec, mesh, query.shape[0]), arguments)
            result = ContextAndWeights(specs[0], specs[0] if has_weights else None)
            options: Any = {"in_specs": specs, "out_specs": result, "check_vma": False}
            local = jax.shard_map(local, mesh=mesh, **options)
        return local(*arguments)

    return replace(entry, function=function)


def _spec(mesh: AnyMesh, rows: int, x: Array) -> PartitionSpec:
    """Returns how an array is split whose first dimension is `rows` or 1 and, of four, whose second
    is the heads or 1."""
    even = x.shape[0] == rows and rows % data_parallel_size(mesh) == 0
    batch = MESH_AXES["batch"] if even else None
    heads = MESH_AXES["heads"] if x.ndim == 4 and x.shape[1] > 1 else None
    return PartitionSpec(batch, heads) if x.ndim == 4 else PartitionSpec(batch)
