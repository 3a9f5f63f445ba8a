"""Fits a model to the mesh on which it is trained."""

from __future__ import annotations

from transformer_jax.models.transformer import Model
from transformer_jax.parallel.kernel import shard_kernel
from transformer_jax.parallel.mesh import AnyMesh, constrain_to, data_parallel_size


def shard_model(model: Model, mesh: AnyMesh) -> Model:
    """Returns the model with activations, attention and embeddings split over the mesh.

    The results are the same; without this, XLA may gather arrays that could stay split.
    """
    return model.clone(
        kernel=shard_kernel(model.kernel, mesh),
        constrain=constrain_to(mesh),
        shards=data_parallel_size(mesh),
    )
