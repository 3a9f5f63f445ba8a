"""However a step is executed, it is the same step. Eight emulated host devices."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from common import assert_gradients_close, build, loss_of, make_batch, pack, tiny

from transformer_jax.config import MeshConfig
from transformer_jax.parallel import parameters
from transformer_jax.parallel.compile import REPLICATED, compile_step
from transformer_jax.parallel.mesh import (
    constrain_to,
    data_parallel_size,
    make_mesh,
    replicate,
    shard_batch,
)
from transformer_jax.parallel.model import shard_kernel
from transformer_jax.parallel.parameters import partition_tree, shard_tree
from transformer_jax.special_ids import PAD
from transformer_jax.training.step import LossSums, eval_step, init_state, train_step
from transformer_jax.types import Batch

KEY = jax.random.key(0)
# Uneven on purpose: the last device of eight has no tokens, and no two have the same number.
LENGTHS = [(7, 6)] * 3 + [(3, 2), (1, 4), (5, 1), (6, 5), (0, 0), (2, 2), (4, 3), (7, 1), (0, 0)]
BATCH = make_batch([*LENGTHS, (3, 6), (1, 1), (0, 0), (0, 0)])
TOKENS = int((BATCH.target_out != PAD).sum())
ODD = Batch(*(ids[:13] for ids in BATCH[:3]))
PACKED = pack(BATCH, [[0, 3, 4], [1], [2, 5], [6], [8, 9], [10, 12], [13], []], 18)
BATCHES = {"even": BATCH, "odd": ODD, "packed": PACKED}
VOCABULARY = 12

ONE = MeshConfig(data=1)
DATA, FSDP = MeshConfig(data=8), MeshConfig(data=1, fsdp=8)
ALL = MeshConfig(data=2, fsdp=2, tensor=2)


def with_empty_rows(batch: Batch, multiple: int) -> Batch:
    """The batch with rows of padding up to a multiple, as the loader adds them."""
    more = -len(batch.source) % multiple
    return jax.tree.map(lambda x: np.pad(x, ((0, more), (0, 0))), batch)


@cache
def start(trained: bool, layer: str) -> tuple[Any, Any, Any]:
    """A step whose state after it holds the gradient, and the state before any step or after 30."""
    model, params = build(tiny(self_layer=layer), VOCABULARY, VOCABULARY)
    keep = optax.chain(optax.trace(0.0), optax.scale(-1e-3))  # the trace is the gradient
    if trained:
        learn = partial(train_step, loss=loss_of(model), optimizer=optax.sgd(1e-2, 0.9))
        run, state = jax.jit(learn), init_state(params, optax.sgd(1e-2, 0.9))
        for _ in range(30):
            state, _ = run(state, BATCH, KEY)
        params = state.params
    return model, keep, jax.tree.map(np.asarray, init_state(params, keep))


@cache
def update(
    how: str,
    config: MeshConfig,
    accumulate: int,
    batch: str,
    trained: bool,
    layer: str = "attention",
) -> Any:
    """Two updates of the model: the gradient of the first, and the metrics of both."""
    model, keep, first = start(trained, layer)
    mesh = make_mesh(config, jax.devices()[: config.data * config.fsdp * config.tensor])
    if how == "jit":
        kernel, shards = shard_kernel("blockwise", mesh), data_parallel_size(mesh)
        model = model.clone(constrain=constrain_to(mesh), kernel=kernel, shards=shards)
    step = partial(train_step, loss=loss_of(model), optimizer=keep, accumulate=accumulate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameters, "MIN_SHARDED_SIZE", 64)
        specs, state = partition_tree(first, mesh), shard_tree(first, mesh)
        run = compile_step(step, mesh, first, executor=how)
    rows = with_empty_rows(BATCHES[batch], data_parallel_size(mesh) * accumulate)
    after, before = run(state, shard_batch(rows, mesh), KEY)
    gradient = jax.tree.map(np.asarray, after.opt_state[0].trace)
    final, metrics = run(after, shard_batch(rows, mesh), KEY)
    assert final.step == 2
    assert jax.tree.map(lambda x: x.sharding.spec, final) == (
        specs if how == "jit" else jax.tree.map(lambda _: REPLICATED, final)
    )
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, after.params)))
    return gradient, jax.tree.map(np.asarray, before), jax.tree.map(np.asarray, metrics)


@pytest.mark.parametrize(
    ("how", "config", "accumulate", "batch", "trained"),
    [
        ("jit", DATA, 1, "even", False),
        pytest.param("jit", ONE, 4, "even", False, marks=pytest.mark.slow),
        pytest.param("jit", FSDP, 1, "even", True, marks=pytest.mark.slow),
        pytest.param("jit", FSDP, 1, "odd", False, marks=pytest.mark.slow),
        pytest.param("jit", ALL, 1, "even", False, marks=pytest.mark.slow),
        ("jit", ALL, 1, "odd", False),
        pytest.param("jit", ALL, 2, "packed", False, marks=pytest.mark.slow),
        ("pmap", DATA, 1, "even", True),
        pytest.param("pmap", MeshConfig(data=4), 2, "even", False, marks=pytest.mark.slow),
    ],
)
def test_meshes_and_executors_agree(
    how: str, config: MeshConfig, accumulate: int, batch: str, trained: bool
) -> None:
    wanted, *metrics = update("jit", ONE, 1, batch, trained)
    gradient, *results = update(how, config, accumulate, batch, trained)
    assert_gradients_close(gradient, wanted, 1e-5)
    tokens = (BATCHES[batch].target_out != PAD).sum()
    for a, b in zip(results, metrics, strict=True):
        assert a["tokens"] == b["tokens"] == tokens
    np.testing.assert_allclose(results[0]["loss"], metrics[0]["loss"], rtol=1e-5)
    np.testing.assert_allclose(results[0]["grad_norm"], metrics[0]["grad_norm"], rtol=1e-5)
    np.testing.assert_allclose(results[1]["loss"], metrics[1]["loss"], rtol=1e-5)


@pytest.mark.slow
def test_a_recurrence_on_a_mesh_has_the_same_gradient() -> None:
    gradients = [update("jit", config, 1, "packed", False, "ssru")[0] for config in (ALL, ONE)]
    assert_gradients_close(*gradients, tolerance=1e-5)


def test_dropout_does_not_depend_on_the_mesh() -> None:
    rates = {"dropout": 0.3, "attention_dropout": 0.3, "ffn_dropout": 0.3}
    model, params = build(tiny(**rates), VOCABULARY, VOCABULARY)

    def losses(config: MeshConfig) -> list[float]:
        mesh = make_mesh(config, jax.devices()[: config.data * config.fsdp * config.tensor])
        split = model.clone(constrain=constrain_to(mesh), kernel=shard_kernel("auto", mesh))
        run = compile_step(loss_of(split), mesh)
        arrays = shard_tree(params, mesh), shard_batch(BATCH, mesh)
        return [float(run(*arrays, jax.random.key(seed), {})[0]) for seed in (0, 1)]

    one, other = losses(ONE)
    for config in (DATA, ALL):
        np.testing.assert_allclose(losses(config), [one, other], rtol=1e-5)
    assert abs(one / other - 1) > 1e-3


@pytest.mark.parametrize("how", ["jit", "pmap"])
def test_evaluation_adds_over_devices(how: Any) -> None:
    def loss(params: Any, batch: Batch, key: Any, _: Any) -> Any:
        tokens = jnp.sum(batch.target_out != PAD)
        return params["scale"] * jnp.sum(batch.target_out), LossSums(tokens, {})

    mesh = make_mesh()
    run = compile_step(partial(eval_step, loss=loss), mesh, executor=how)
    params = replicate({"scale": np.float32(0.5)}, mesh)
    total, count = run(params, shard_batch(BATCH, mesh))
    assert total == 0.5 * BATCH.target_out.sum()
    assert count == TOKENS
    assert not params["scale"].is_deleted()


def test_pmap_gives_each_device_its_key() -> None:
    def step(state: Any, batch: Any, key: Any, reduce: Any) -> Any:
        return reduce(jax.random.uniform(key))

    mesh = make_mesh()
    batch = shard_batch(np.zeros((8, 1)), mesh)
    total = compile_step(step, mesh, executor="pmap")(np.zeros(()), batch, KEY)
    wanted = sum(jax.random.uniform(jax.random.fold_in(KEY, i)) for i in range(8))
    np.testing.assert_allclose(total, wanted, rtol=1e-6)


@pytest.mark.parametrize("how", ["jit", "pmap"])
@pytest.mark.parametrize("devices", [1, 8])
def test_donation_leaves_the_callers_numpy_arrays_alone(how: Any, devices: int) -> None:
    def step(state: Any, batch: Any, reduce: Any = None) -> Any:
        return state + 1.0, batch.sum()

    mesh = make_mesh(devices=jax.devices()[:devices])
    mine = np.zeros(4096, np.float32)
    state = replicate(mine, mesh)
    run = compile_step(step, mesh, mine, executor=how)
    after, _ = run(state, shard_batch(np.zeros(8), mesh))
    assert state.is_deleted()
    assert not mine.any()
    np.testing.assert_array_equal(after, 1.0)
