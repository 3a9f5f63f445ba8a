"""One update and one evaluation, mostly of a model small enough to calculate by hand."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from common import VOCABULARY, build, loss_of, make_batch, tiny
from jaxtyping import Array

from transformer_jax.config import Config, ExecutionConfig, MeshConfig, OptimizerConfig
from transformer_jax.models.make import make_model
from transformer_jax.parallel.mesh import make_mesh, shard_batch
from transformer_jax.special_ids import PAD
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.setup import prepare_step
from transformer_jax.training.step import (
    Averages,
    LossSums,
    TrainState,
    eval_step,
    gradients,
    init_state,
    train_step,
)
from transformer_jax.types import Batch, Mean, Params

BATCH = make_batch([(3, 4), (2, 2), (1, 1), (0, 0)])
KEY = jax.random.key(5)


def toy_loss(params: Any, batch: Batch, key: Any, averages: Averages) -> tuple[Array, LossSums]:
    """Half the squared distance of each target's weight from 1, or from a random number."""
    aim = 1.0 if key is None else jax.random.uniform(key)
    targets = jnp.asarray(batch.target_out)
    losses = jnp.square(params["weight"][targets] - aim) / 2
    total, tokens = jnp.sum(jnp.where(targets != PAD, losses, 0.0)), jnp.sum(targets != PAD)
    metrics = {"square": Mean(2 * total, tokens.astype(jnp.float32))}
    return total, LossSums(tokens, metrics)


def toy_state(optimizer: Any, ema: float | None = None) -> TrainState:
    return init_state({"weight": jnp.zeros(VOCABULARY)}, optimizer, ema)


def counts(batch: Batch) -> np.ndarray:
    """How often each id is a target; padding is none."""
    frequency = np.bincount(batch.target_out.ravel(), minlength=VOCABULARY)
    frequency[0] = 0
    return frequency


def test_update_is_the_mean_gradient_over_tokens() -> None:
    state = toy_state(optax.sgd(1.0))._replace(step=jnp.asarray(3))
    after, metrics = train_step(state, BATCH, KEY, loss=toy_loss, optimizer=optax.sgd(1.0))
    aim = jax.random.uniform(jax.random.fold_in(KEY, 3))  # the key of the step
    np.testing.assert_allclose(after.params["weight"], aim * counts(BATCH) / 7, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], aim**2 / 2, rtol=1e-6)
    norm = np.linalg.norm(aim * counts(BATCH) / 7)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)
    assert metrics["tokens"] == 7
    assert after.step == 4
    assert after.ema is None
    assert after.eval_params is after.params


def test_microbatches_are_added_and_each_has_its_key() -> None:
    params = {"weight": jnp.zeros(VOCABULARY)}
    whole = gradients(params, BATCH, None, {}, loss=toy_loss)
    parts = gradients(params, BATCH, None, {}, loss=toy_loss, accumulate=2)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), parts, whole)
    summed, _, _ = gradients(params, BATCH, KEY, {}, loss=toy_loss, accumulate=2)
    wanted = np.zeros(VOCABULARY)
    for i in range(2):
        every_other = Batch(*(x[i::2] for x in BATCH[:3]))
        wanted -= jax.random.uniform(jax.random.fold_in(KEY, i)) * counts(every_other)
    np.testing.assert_allclose(summed["weight"], wanted, rtol=1e-6)

    with pytest.raises(ValueError, match=r"optimizer\.accumulate=3: must divide the 4 rows"):
        gradients(params, BATCH, None, {}, loss=toy_loss, accumulate=3)


def test_batch_without_tokens_changes_nothing() -> None:
    config = Config(optimizer=OptimizerConfig(warmup=1, clip_norm=1.0))
    optimizer = make_optimizer(config, {"weight": jnp.zeros(VOCABULARY)})
    empty = make_batch([(0, 0), (0, 0)])
    run = partial(train_step, loss=toy_loss, optimizer=optimizer)
    after, metrics = run(toy_state(optimizer), empty, KEY)
    assert not after.params["weight"].any()
    assert metrics["loss"] == metrics["tokens"] == metrics["grad_norm"] == 0


@pytest.mark.parametrize("wrong", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_but_the_step(wrong: str) -> None:
    def loss(params: Any, *_: Any) -> Any:
        nan = jnp.where(params["w"][0] > 0, jnp.nan, 0.0)
        total = (
            jnp.sum(params["w"]) + nan if wrong == "loss" else jnp.sum(jnp.sqrt(0 * params["w"]))
        )
        return total, LossSums(jnp.array(4), {"reward": Mean(total, jnp.array(1.0))})

    params = {"w": jnp.array([1.0, -2.0])}
    optimizer = make_optimizer(Config(), params)
    state = init_state(params, optimizer, 0.9, {"reward": jnp.array(0.5)})
    step = jax.jit(partial(train_step, loss=loss, optimizer=optimizer, ema=0.9))
    after, metrics = step(state, make_batch([(3, 2)]), jax.random.key(0))
    assert not np.isfinite(metrics["grad_norm" if wrong == "gradient" else "loss"])
    assert int(after.step) == 1
    for old, new in zip(*map(jax.tree.leaves, (state._replace(step=1), after)), strict=True):
        assert np.asarray(old).tobytes() == np.asarray(new).astype(np.asarray(old).dtype).tobytes()


def test_moving_average() -> None:
    sgd, decay = optax.sgd(1.0), 0.15
    state = toy_state(sgd, decay)
    np.testing.assert_array_equal(state.eval_params["weight"], state.params["weight"])
    average = np.zeros(VOCABULARY)
    for step in range(3):
        state, _ = train_step(state, BATCH, KEY, loss=toy_loss, optimizer=sgd, ema=decay)
        now = min(decay, (1 + step) / (10 + step))  # 1/10, then 0.15
        average = now * average + (1 - now) * np.asarray(state.params["weight"])
        np.testing.assert_allclose(state.eval_params["weight"], average, rtol=1e-6)
    assert np.any(state.eval_params["weight"] != state.params["weight"])


def test_metrics_of_the_loss_are_means_by_name() -> None:
    """This also holds over microbatches, and the running means of those names are updated."""
    sgd = optax.sgd(1.0)
    state = toy_state(sgd)._replace(averages={"square": jnp.asarray(2.0)})
    for accumulate in (1, 2):
        run = partial(train_step, loss=toy_loss, optimizer=sgd, accumulate=accumulate)
        after, metrics = run(state, BATCH, KEY)
        np.testing.assert_allclose(metrics["square"], 2 * metrics["loss"], rtol=1e-6)
        wanted = 0.1 * 2.0 + 0.9 * metrics["square"]  # the decay begins at 1/10
        np.testing.assert_allclose(after.averages["square"], wanted, rtol=1e-6)
    after, _ = run(state._replace(step=jnp.asarray(10**6)), BATCH, KEY)
    assert after.averages["square"] > 0.9 * 2.0


def test_evaluation_is_without_dropout() -> None:
    total, count = eval_step({"weight": jnp.zeros(VOCABULARY)}, BATCH, loss=toy_loss)
    assert (total, count) == (3.5, 7)


@pytest.mark.optimized
def test_training_learns_and_resumes_to_the_bit() -> None:
    model, params = build(tiny(dropout=0.1, attention_dropout=0.1, ffn_dropout=0.1))
    options = OptimizerConfig(schedule="inverse_sqrt", learning_rate=0.02, warmup=5, clip_norm=1.0)
    optimizer = make_optimizer(Config(optimizer=options), params)
    update = partial(train_step, loss=loss_of(model), optimizer=optimizer, accumulate=2, ema=0.9)
    run = jax.jit(update)
    state, losses, half = init_state(params, optimizer, 0.9), [], None
    for step in range(40):
        state, metrics = run(state, BATCH, KEY)
        losses.append(float(metrics["loss"]))
        if step == 19:
            half = jax.tree.map(np.asarray, state)  # as a checkpoint holds it
    assert losses[-1] < 0.5 * losses[0]
    for _ in range(20):
        half, _ = run(half, BATCH, KEY)
    jax.tree.map(np.testing.assert_array_equal, half, state)


@pytest.mark.slow
def test_fifty_losses_are_those_of_a_plain_step() -> None:
    """Split over eight devices and two microbatches, with attention block by block."""
    options = OptimizerConfig(schedule="inverse_sqrt", learning_rate=0.01, warmup=5, accumulate=2)
    execution = ExecutionConfig(kernel="blockwise")
    config = Config(tiny(), execution=execution, optimizer=replace(options, ema=0.9))
    mesh = make_mesh(MeshConfig(fsdp=2))
    setup = prepare_step(config, (VOCABULARY, VOCABULARY), mesh)
    compute, apply = setup.compile_gradients(), setup.compile_apply()
    state = jax.jit(setup.init)(KEY)
    params = jax.tree.map(jnp.copy, state.params)
    model = make_model(config.model, VOCABULARY, VOCABULARY, "reference")

    def rate(count: Any) -> Any:
        return 0.01 * jnp.minimum((count + 1) / 5, jnp.sqrt(5 / (count + 1)))

    plain = optax.adam(rate, options.b1, options.b2, options.eps)
    moments = plain.init(params)

    @jax.jit
    @jax.value_and_grad
    def loss_of_plain(params: Params, batch: Batch) -> Array:
        output: Any = model.apply({"params": params}, batch)
        wanted = jax.nn.one_hot(batch.target_out, VOCABULARY)
        smoothed = optax.smooth_labels(wanted, options.label_smoothing)
        losses = optax.softmax_cross_entropy(output.logits, smoothed)
        return jnp.mean(losses, where=batch.target_out != PAD)

    draw = np.random.default_rng(0)
    for step in range(50):
        batch = make_batch(draw.integers(1, 7, (16, 2)).tolist(), seed=step)
        state, metrics = apply(state, *compute(state, shard_batch(batch, mesh), KEY))
        loss, gradient = loss_of_plain(params, batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
        change, moments = plain.update(gradient, moments)
        params = optax.apply_updates(params, change)


def test_frozen_parameters_have_no_part_in_the_gradient_norm() -> None:
    def loss(params: Any, *_: Any) -> Any:
        total = 3.0 * jnp.sum(params["decoder"]["w"]) + 100.0 * jnp.sum(params["encoder"]["w"])
        return total, LossSums(jnp.array(1), {})

    params = {"encoder": {"w": jnp.ones(2)}, "decoder": {"w": jnp.ones(1)}}
    optimizer = optax.chain(optax.clip_by_global_norm(3.0), optax.sgd(1.0))
    state = init_state(params, optimizer, frozen=["encoder"])
    step = {"loss": loss, "optimizer": optimizer, "frozen": ["encoder"]}
    after, metrics = train_step(state, BATCH, jax.random.key(0), **step)
    assert metrics["grad_norm"] == 3.0
    assert after.params["decoder"]["w"] == -2.0  # not clipped
    np.testing.assert_array_equal(after.params["encoder"]["w"], 1.0)
