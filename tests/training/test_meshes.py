"""A run is the same run on any mesh. Eight emulated host devices."""

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from common import LENGTHS, changed, flat, make_batch, tiny
from training_process import of_kind

from tools.processes import sources
from transformer_jax.config import Config, ExecutionConfig, MeshConfig, OptimizerConfig
from transformer_jax.decoding.translator import Translator
from transformer_jax.models.make import abstract_params
from transformer_jax.models.parameter_paths import map_with_paths, split
from transformer_jax.parallel import mesh as meshes
from transformer_jax.parallel import parameters
from transformer_jax.parallel.mesh import make_mesh, shard_batch
from transformer_jax.runs.run import Run
from transformer_jax.training import setup, trainer
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.reporters import Record
from transformer_jax.training.step import loss_fn
from transformer_jax.training.trainer import train
from transformer_jax.types import Batch

ALL = MeshConfig(data=2, fsdp=2, tensor=2)


pytestmark = pytest.mark.usefixtures("small_arrays_are_split")


@pytest.mark.long
def test_a_run_goes_on_with_other_devices(
    tiny_config: Config, finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout and subword sampling are on. The short form of `make measure NAME=devices`."""
    consumed: list[list[list[int]]] = []
    reported: list[Record] = []

    def recorded(batch: Batch, mesh: Any) -> Any:
        consumed.append(sorted(sources(batch)))
        return shard_batch(batch, mesh)

    def piece(steps: int, mesh: MeshConfig, devices: int) -> Run:
        few = partial(make_mesh, devices=jax.devices()[:devices])
        monkeypatch.setattr(meshes, "make_mesh", few)
        config = changed(replace(tiny_config, mesh=mesh), data={"dev": ()}, train={"steps": steps})
        return train(config, tmp_path / "r", reporters=[reported.append])

    monkeypatch.setattr(trainer, "shard_batch", recorded)
    piece(6, MeshConfig(fsdp=8), 8)
    made = piece(12, MeshConfig(fsdp=2, tensor=2), 4)
    [said] = [record["text"] for record in reported if "continuing" in record.get("text", "")]
    changes = "train.steps: 6 -> 12; mesh.fsdp: 8 -> 2; mesh.tensor: 1 -> 2"
    assert said == f"continuing run {made.folder} at step 6; changed: {changes}"
    losses = [[each["loss"] for each in of_kind(run, "train")] for run in (made, finished)]
    assert len(losses[0]) == 6
    np.testing.assert_allclose(*losses, rtol=1e-5)
    monkeypatch.undo()
    batches = itertools.islice(setup.prepare(tiny_config).loader.batches(0), 12)
    assert consumed == [sorted(sources(loaded.batch)) for loaded in batches]


@pytest.mark.long
def test_translations_do_not_depend_on_the_mesh(finished: Run) -> None:
    params, sizes = finished.params(), (finished.config, finished.tokenizers)
    lines = ["red green", "old", "", "new blue small red red", "old new"]
    wanted = Translator(*sizes, params, make_mesh(devices=jax.devices()[:1]))
    split = Translator(*sizes, params, make_mesh(ALL))
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(split.params))
    for one, other in zip(wanted.stream(lines), split.stream(lines), strict=True):
        assert one.text == other.text
        scores = [[h.score for h in each.hypotheses] for each in (one, other)]
        np.testing.assert_allclose(*scores, rtol=1e-5)


def test_the_initial_state_is_split_as_it_is_planned(tiny_config: Config) -> None:
    state: Any = setup.prepare(replace(tiny_config, mesh=ALL)).abstract_state
    shards = [
        leaf.sharding.shard_shape(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if "encoder/layers_0/ffn/in/kernel"
        in jax.tree_util.keystr(path, simple=True, separator="/")
    ]
    assert shards == [(8, 16)] * 4  # the parameters, Adam's two moments and the average
    assert state.step.sharding.is_fully_replicated


@pytest.mark.long
def test_r_drop_does_not_depend_on_the_mesh(tiny_config: Config) -> None:
    """Both rows of a pair are on one device."""
    batch = next(setup.prepare(tiny_config).loader.batches()).batch

    def total(mesh: MeshConfig, devices: int) -> Any:
        on = make_mesh(mesh, devices=jax.devices()[:devices])
        model = setup.prepare_step(replace(tiny_config, mesh=mesh), (320, 320), on).model
        loss, key = jax.jit(loss_fn(model, 0.1, 5.0)), jax.random.key(0)
        params = parameters.shard_tree(jax.jit(model.init)(key, batch)["params"], on)
        return loss(params, shard_batch(batch, on), key, {})[0]

    one, other = total(MeshConfig(), 1), total(MeshConfig(data=4, tensor=2), 8)
    np.testing.assert_allclose(other, one, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [MeshConfig(data=4, tensor=2), MeshConfig(data=2, fsdp=4)])
def test_muon_does_not_depend_on_the_mesh(tiny_config: Config, mesh: MeshConfig) -> None:
    """Matrices that are split over devices are made orthogonal as wholes."""
    config = replace(tiny_config, optimizer=OptimizerConfig(kind="muon", warmup=1))
    params, key = abstract_params(config.model, 320, 320), jax.random.key(0)
    optimizer = make_optimizer(config, params)
    gradient = jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape), params)

    def update(mesh: MeshConfig, devices: int) -> Any:
        on = make_mesh(mesh, devices=jax.devices()[:devices])
        tree = parameters.shard_tree(gradient, on)
        return jax.jit(lambda g: optimizer.update(g, optimizer.init(g), g)[0])(tree)

    one, other = update(MeshConfig(), 1), update(mesh, 8)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), one, other)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "mesh", "executor"),
    [("muon", MeshConfig(data=2, fsdp=4), "jit"), ("adam", MeshConfig(data=8), "pmap")],
)
def test_frozen_parameters_keep_their_bits(kind: str, mesh: MeshConfig, executor: Any) -> None:
    """After 100 steps with all that could change them; the optimizer holds nothing of them."""
    options = OptimizerConfig(kind, "inverse_sqrt", 0.01, 1, clip_norm=0.5, weight_decay=0.1)
    options = replace(options, ema=0.9, accumulate=2, frozen=("encoder", "*_attention/query/*"))
    execution = ExecutionConfig(executor=executor)
    config = Config(tiny(dropout=0.1), optimizer=options, execution=execution, mesh=mesh)
    on, key = make_mesh(mesh, jax.devices()[: mesh.data * mesh.fsdp]), jax.random.key(0)
    step, batch = setup.prepare_step(config, (11, 11), on), make_batch(LENGTHS * 4)
    state = parameters.shard_tree(jax.jit(step.init)(key), on)
    compute, apply, batch = step.compile_gradients(), step.compile_apply(), shard_batch(batch, on)
    before = jax.tree.map(np.asarray, flat(state.params))
    for _ in range(100):
        # XLA aborts if devices that wait for each other in many steps starve on a busy machine.
        state, _ = jax.block_until_ready(apply(state, *compute(state, batch, key)))
    frozen, trained = map(flat, split(state.params, options.frozen))
    for path, leaf in before.items():
        after = np.asarray(frozen.get(path, trained.get(path)))
        assert (after.tobytes() == leaf.tobytes()) == (path in frozen), path
        assert np.isfinite(after).all(), path
    assert flat(state.ema).keys() == trained.keys()
    assert flat(state.eval_params).keys() == before.keys()
    held = [*jax.tree.leaves(map_with_paths(lambda path, _: path, state.opt_state))]
    moments = {path for path in before if any(each.endswith(f"/{path}") for each in held)}
    assert moments == trained.keys()
