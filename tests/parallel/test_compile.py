"""However a step is executed, it is the same step. Eight devices made of the CPU."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from common import assert_gradients_close, build, loss_of, make_batch, tiny

from transformer_jax.parallel.compile import compile_step
from transformer_jax.parallel.mesh import make_mesh, replicate, shard_batch
from transformer_jax.special_ids import PAD
from transformer_jax.training.step import LossSums, eval_step, init_state, train_step
from transformer_jax.types import Batch

KEY = jax.random.key(0)
# Uneven on purpose: the last device of eight has no tokens, and no two have the same number.
LENGTHS = [(7, 6)] * 3 + [(3, 2), (1, 4), (5, 1), (6, 5), (0, 0), (2, 2), (4, 3), (7, 1), (0, 0)]
BATCH = make_batch([*LENGTHS, (3, 6), (1, 1), (0, 0), (0, 0)])
TOKENS = int((BATCH.target_out != PAD).sum())


@cache
def update(how: str, devices: int, accumulate: int) -> Any:
    """Two updates of the model: the mean gradient of the first, and the metrics of both."""
    model, params = build(tiny())
    keep = optax.chain(optax.trace(0.0), optax.scale(-0.1))  # the trace is the gradient
    step = partial(train_step, loss=loss_of(model), optimizer=keep, accumulate=accumulate)
    mesh = make_mesh(jax.devices()[:devices])
    run = compile_step(step, mesh, how, donate=True)
    start = jax.tree.map(np.asarray, init_state(params, keep))
    state, batch = replicate(start, mesh), shard_batch(BATCH, mesh)
    after, first = run(state, batch, KEY)
    gradient = jax.tree.map(np.asarray, after.opt_state[0].trace)
    final, second = run(after, batch, KEY)
    assert final.step == 2
    for leaf in jax.tree.leaves(final):
        assert leaf.sharding.is_fully_replicated
        assert leaf.sharding.device_set == set(mesh.devices.flat)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, after.params)))
    return gradient, jax.tree.map(np.asarray, first), jax.tree.map(np.asarray, second)


@pytest.mark.parametrize(
    ("how", "devices", "accumulate"),
    [("jit", 8, 1), ("jit", 1, 4), ("jit", 8, 2), ("pmap", 8, 1), ("pmap", 4, 2)],
)
def test_executors_agree(how: str, devices: int, accumulate: int) -> None:
    wanted, *metrics = update("jit", 1, 1)
    gradient, *found = update(how, devices, accumulate)
    assert_gradients_close(gradient, wanted, 1e-5)
    for a, b in zip(found, metrics, strict=True):
        assert a["tokens"] == b["tokens"] == TOKENS
    np.testing.assert_allclose(found[0]["loss"], metrics[0]["loss"], rtol=1e-5)
    np.testing.assert_allclose(found[0]["grad_norm"], metrics[0]["grad_norm"], rtol=1e-5)
    np.testing.assert_allclose(found[1]["loss"], metrics[1]["loss"], rtol=1e-5)


def test_dropout_does_not_depend_on_the_mesh() -> None:
    model, params = build(tiny(dropout=0.3, attention_dropout=0.3, ffn_dropout=0.3))

    def losses(devices: int) -> list[float]:
        mesh = make_mesh(jax.devices()[:devices])
        run = compile_step(loss_of(model), mesh)
        arrays = replicate(params, mesh), shard_batch(BATCH, mesh)
        return [float(run(*arrays, jax.random.key(seed), {})[0]) for seed in (0, 1)]

    one, other = losses(1)
    np.testing.assert_allclose(losses(8), [one, other], rtol=1e-5)
    assert abs(one / other - 1) > 1e-3


@pytest.mark.parametrize("how", ["jit", "pmap"])
def test_evaluation_adds_over_devices(how: Any) -> None:
    def loss(params: Any, batch: Batch, key: Any, _: Any) -> Any:
        tokens = jnp.sum(batch.target_out != PAD)
        return params["scale"] * jnp.sum(batch.target_out), LossSums(tokens, {})

    mesh = make_mesh()
    run = compile_step(partial(eval_step, loss=loss), mesh, how)
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
    total = compile_step(step, mesh, "pmap")(np.zeros(()), batch, KEY)
    wanted = sum(jax.random.uniform(jax.random.fold_in(KEY, i)) for i in range(8))
    np.testing.assert_allclose(total, wanted, rtol=1e-6)


@pytest.mark.parametrize("how", ["jit", "pmap"])
@pytest.mark.parametrize("devices", [1, 8])
def test_donation_leaves_the_callers_numpy_arrays_alone(how: Any, devices: int) -> None:
    def step(state: Any, batch: Any, reduce: Any = None) -> Any:
        return state + 1.0

    mesh = make_mesh(jax.devices()[:devices])
    mine = np.zeros(4096, np.float32)
    state = replicate(mine, mesh)
    after = compile_step(step, mesh, how, donate=True)(state, shard_batch(np.zeros(8), mesh))
    assert state.is_deleted()
    assert not mine.any()
    np.testing.assert_array_equal(after, 1.0)


def test_rows_are_split_and_the_rest_is_everywhere() -> None:
    mesh = make_mesh()
    batch = shard_batch(BATCH, mesh)
    for mine, theirs in zip(batch[:3], BATCH[:3], strict=True):
        assert {shard.data.shape[0] for shard in mine.addressable_shards} == {2}
        np.testing.assert_array_equal(mine, theirs)
    assert batch.source_segments is None
    rows = compile_step(lambda state, batch: state + batch.source, mesh)
    replicated = replicate(np.int32(1), mesh)
    for everywhere in (replicated, rows(replicated, batch)):
        assert everywhere.sharding.is_fully_replicated
        assert len(everywhere.addressable_shards) == 8
