"""Where arrays live: the table of logical names, and functions compiled with shardings."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import build, make_batch, tiny
from jax.sharding import PartitionSpec

from transformer_jax.parallel import processes
from transformer_jax.parallel.compile import compile_function
from transformer_jax.parallel.mesh import (
    MESH_AXES,
    constrain_to,
    data_parallel_size,
    make_mesh,
    partition,
    replicate,
    shard_batch,
)
from transformer_jax.types import Batch


def test_the_size_of_data_parallelism_is_that_of_its_axis() -> None:
    assert data_parallel_size(make_mesh()) == 8
    assert data_parallel_size(make_mesh(jax.devices()[:2])) == 2


def test_activations_are_split_by_the_names_of_their_dimensions() -> None:
    mesh = make_mesh()
    run = jax.jit(lambda x: constrain_to(mesh)(x, ("batch", "heads", "length", None)))
    placed = run(jnp.zeros((16, 4, 3, 2)))
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 4, 3, 2)}
    with pytest.raises(KeyError, match="heds"):
        partition(("batch", "heds"))


def test_the_model_names_dimensions_that_the_table_knows() -> None:
    """Each activation that it constrains has a name per dimension; results do not change."""
    seen: set[tuple[str | None, ...]] = set()

    def note(x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
        assert x.ndim == len(names)
        seen.add(names)
        return x

    model, params = build(tiny())
    batch = Batch(*map(jnp.asarray, make_batch([(7, 6)] * 8)[:3]))
    noted: Any = model.clone(constrain=note).apply({"params": params}, batch)
    named = {name for names in seen for name in names}
    assert named - {None} == set(MESH_AXES)
    mesh = make_mesh()
    split = model.clone(constrain=constrain_to(mesh))
    run = compile_function(lambda p, b: split.apply({"params": p}, b)[0], mesh)
    logits = run(replicate(params, mesh), shard_batch(batch, mesh))
    np.testing.assert_allclose(logits, noted.logits, rtol=0, atol=1e-5)


def test_shardings_are_given_for_each_argument_and_the_result() -> None:
    mesh = make_mesh()
    rows, everywhere = PartitionSpec("data"), PartitionSpec()

    def add(tree: Any, scalar: Any) -> Any:
        return jax.tree.map(lambda x: x + scalar, tree)

    run = compile_function(add, mesh, arguments=[{"a": rows, "b": everywhere}, everywhere])
    found = run({"a": np.zeros((8, 2)), "b": np.zeros(3)}, np.ones(()))
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(found))
    run = compile_function(add, mesh, result=rows, donate=(0,))
    tree = shard_batch(np.zeros((8, 2)), mesh)
    found = run(tree, np.ones(()))
    assert {shard.data.shape for shard in found.addressable_shards} == {(1, 2)}
    assert tree.is_deleted()


def test_one_process_is_its_own_coordinator() -> None:
    assert processes.this_process() == (0, 1)
    assert processes.is_coordinator()
    assert processes.broadcast(7) == 7
    assert processes.any_process(True)
    assert not processes.any_process(False)
    processes.wait_for_all("test")
