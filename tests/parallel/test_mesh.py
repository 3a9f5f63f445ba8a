"""Where arrays live: the table of logical names, and functions compiled with shardings."""

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import build, flat, make_batch, tiny
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.attention import Mask, attend
from transformer_jax.config import BASE, Config, ExecutionConfig, MeshConfig
from transformer_jax.errors import UserError
from transformer_jax.models.make import make_model
from transformer_jax.models.parameter_paths import DIMENSIONS
from transformer_jax.parallel.compile import compile_function
from transformer_jax.parallel.mesh import (
    MESH_AXES,
    check_mesh,
    constrain_to,
    make_mesh,
    mesh_shape,
    partition,
    replicate,
    shard_batch,
)
from transformer_jax.parallel.model import shard_kernel
from transformer_jax.parallel.parameters import MIN_SHARDED_SIZE, partition_tree, shardings
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.step import init_state
from transformer_jax.types import Batch, unconstrained


@pytest.mark.parametrize(
    ("config", "devices", "shape"),
    [
        (MeshConfig(), 8, (8, 1, 1)),
        (MeshConfig(fsdp=4), 8, (2, 4, 1)),
        (MeshConfig(data=1, fsdp=2, tensor=4), 8, (1, 2, 4)),
        (MeshConfig(fsdp=3), 6, (2, 3, 1)),
    ],
)
def test_the_mesh_takes_all_devices(
    config: MeshConfig, devices: int, shape: tuple[int, int, int]
) -> None:
    assert mesh_shape(config, devices) == shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 2}, "mesh.tensor=4: must divide model.heads=2"),
        ({"heads": 4, "kv_heads": 2}, "mesh.tensor=4: must divide model.kv_heads=2"),
        ({"heads": 4, "d_ff": 30}, "mesh.tensor=4: must divide model.d_ff=30"),
        ({"heads": 4}, "mesh.tensor=4: must divide the 11 ids of the vocabulary (tokenizer.voc"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(changes: dict[str, int], message: str) -> None:
    config = Config(model=tiny(**changes), mesh=MeshConfig(tensor=4))
    with pytest.raises(UserError, match=re.escape(message)):
        check_mesh(config, (12, 11))


def test_pmap_has_one_axis() -> None:
    config = Config(execution=ExecutionConfig(executor="pmap"), mesh=MeshConfig(fsdp=2))
    with pytest.raises(UserError, match=r"execution.executor='pmap': needs mesh.fsdp=1 and"):
        check_mesh(config)


def test_fsdp_splits_the_largest_dimension_of_all_state() -> None:
    """Parameters and Adam's moments of the base model; each device holds an eighth within 2 %."""
    model = make_model(BASE, 8000, 8000)
    batch = make_batch([(5, 4)])
    params = jax.eval_shape(model.init, jax.random.key(0), batch)["params"]
    optimizer = make_optimizer(Config(), params)
    state = jax.eval_shape(lambda p: init_state(p, optimizer, 0.99), params)
    split = shardings(state, make_mesh(MeshConfig(fsdp=8)))
    of_shards = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)), state, split)
    sizes = jax.tree.map(lambda x: x.size, state)
    for size, of_shard in zip(*map(jax.tree.leaves, (sizes, of_shards)), strict=True):
        assert of_shard == (size // 8 if size >= MIN_SHARDED_SIZE else size)
    total, held = (sum(jax.tree.leaves(tree)) for tree in (sizes, of_shards))
    assert held <= 1.02 * total / 8
    ffn = split.params["encoder"]["layers_0"]["ffn"]
    assert ffn["in"]["kernel"].spec == PartitionSpec(None, "fsdp")
    assert ffn["out"]["kernel"].spec == PartitionSpec("fsdp", None)


def test_tensor_splits_heads_hidden_units_and_vocabulary() -> None:
    _, params = build(tiny(kv_heads=2, activation="swiglu", tied="none"), 12, 12)
    split = partition_tree(params, make_mesh(MeshConfig(data=4, tensor=2)))
    named = {name for name, spec in flat(split).items() if "tensor" in spec}
    unsplit = {name.rpartition("/")[2] for name in flat(split)} - {"kernel", "embedding", "output"}
    layer = "decoder/layers_0/"
    assert split["output"] == PartitionSpec("tensor", None)
    assert {f"{layer}self_attention/{n}/kernel" for n in ("query", "key", "value", "out")} <= named
    assert {f"{layer}ffn/{n}/kernel" for n in ("in", "gate", "out")} <= named
    assert not any(name.endswith(("scale", "out/bias")) for name in named)
    assert unsplit == {"bias", "scale"}


@pytest.mark.parametrize("kernel", ["auto", "blockwise", "reference"])
def test_kernels_run_on_the_rows_and_heads_of_each_device(kernel: str) -> None:
    """2 x 2 devices; nothing is gathered, and the result is that of one device."""
    mesh = make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])
    draw = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(draw.normal(size=(4, n, 160, 8)), jnp.float32) for n in (4, 2, 2)
    )
    bias = jnp.asarray(draw.normal(size=(1, 4, 160, 160)), jnp.float32)
    segments = np.ones((4, 160), np.int32)
    segments[1, 99:], segments[2, 50:] = 2, 0
    mask = Mask(segments, None, segments, causal=True)
    entry = shard_kernel(kernel, mesh)
    split = jax.jit(partial(attend, kernel=entry))
    place = partial(jax.device_put, device=NamedSharding(mesh, partition(("batch", "heads"))))
    choices: list[Any] = [{}] if kernel == "blockwise" else [{}, {"bias": bias}]
    for more in choices:
        wanted, _ = attend(query, key, value, mask, kernel="reference", **more)
        program = split.lower(*map(place, (query, key, value)), mask, **more).compile()
        assert "all-gather" not in str(program.as_text())
        output, weights = split(*map(place, (query, key, value)), mask, **more)
        np.testing.assert_allclose(output, wanted, rtol=0, atol=2e-6)
        assert output.sharding.shard_shape(output.shape) == (2, 2, 160, 8)
        assert (weights is not None) == (kernel == "reference")


def test_one_device_compiles_the_model_without_constraints() -> None:
    """A constraint without effect changed the last bits of gradients on some processors."""
    assert constrain_to(make_mesh(devices=jax.devices()[:1])) is unconstrained


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
    of_parameters = {name for names in DIMENSIONS.values() for name in names}
    assert named - {None} | of_parameters == set(MESH_AXES)
    mesh = make_mesh()
    split = model.clone(constrain=constrain_to(mesh))
    run = compile_function(lambda p, b: split.apply({"params": p}, b)[0], mesh)
    logits = run(replicate(params, mesh), shard_batch(batch, mesh))
    np.testing.assert_allclose(logits, noted.logits, rtol=0, atol=1e-5)


def test_a_result_has_the_sharding_that_is_asked_for() -> None:
    mesh = make_mesh()
    rows = PartitionSpec("data")

    def add(tree: Any, scalar: Any) -> Any:
        return jax.tree.map(lambda x: x + scalar, tree)

    placed = compile_function(add, mesh)({"a": np.zeros((8, 2)), "b": np.zeros(3)}, np.ones(()))
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(placed))
    run = compile_function(add, mesh, result=rows, donate=(0,))
    tree = shard_batch(np.zeros((8, 2)), mesh)
    placed = run(tree, np.ones(()))
    assert {shard.data.shape for shard in placed.addressable_shards} == {(1, 2)}
    assert tree.is_deleted()
