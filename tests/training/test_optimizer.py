"""Schedules and optimizers against their formulas, and the one optax chain."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from common import Patch, build, flat, tiny

from transformer_jax.config import Config, DataConfig, OptimizerConfig, TrainConfig
from transformer_jax.errors import UserError
from transformer_jax.models.parameter_paths import map_with_paths
from transformer_jax.training.optimizer import OPTIMIZERS, make_optimizer
from transformer_jax.training.schedules import SCHEDULES, Schedule, describe_end, learning_rate
from transformer_jax.training.setup import check_config

WARMUP, END = 40, 200


def rate(step: int, kind: Any, d_model: int = 64) -> float:
    """The learning rate of update `step`, counted from 1."""
    end = END if SCHEDULES[kind].ends else None
    config = OptimizerConfig(schedule=kind, learning_rate=0.5, warmup=WARMUP, decay_steps=end)
    return np.asarray(learning_rate(config, d_model)(jnp.asarray(step - 1))).item()


@pytest.mark.parametrize("step", [1, 2, 39, WARMUP, 41, 4 * WARMUP, 100_000])
def test_noam_and_the_warmup_of_the_others(step: int) -> None:
    wanted = 0.5 * 64**-0.5 * min(step**-0.5, step * WARMUP**-1.5)
    np.testing.assert_allclose(rate(step, "noam"), wanted, rtol=1e-6)
    for kind in ("inverse_sqrt", "cosine", "linear") if step <= WARMUP else ():
        np.testing.assert_allclose(rate(step, kind), 0.5 * step / WARMUP, rtol=1e-6)


@pytest.mark.parametrize("step", [WARMUP, WARMUP + 1, 120, END - 1, END, END + 50])
def test_after_warmup(step: int) -> None:
    left = max(0.0, (END - step) / (END - WARMUP))
    np.testing.assert_allclose(rate(step, "inverse_sqrt"), 0.5 * (WARMUP / step) ** 0.5, rtol=1e-6)
    np.testing.assert_allclose(rate(step, "linear"), 0.5 * left, atol=1e-7)
    wanted = 0.5 * (1 + math.cos(math.pi * (1 - left))) / 2
    np.testing.assert_allclose(rate(step, "cosine"), wanted, atol=1e-7)


PARAMS = {"kernel": jnp.array([[3.0, -4.0]]), "bias": jnp.array([1.0, 2.0])}
GRADIENT = {"kernel": jnp.array([[0.6, -0.3]]), "bias": jnp.array([0.2, 0.0])}


def updates(**changes: Any) -> tuple[Any, Any]:
    """The updates of PARAMS for GRADIENT and then for twice that, and the state after both."""
    options = OptimizerConfig(**({"schedule": "inverse_sqrt", "warmup": WARMUP} | changes))
    optimizer = make_optimizer(Config(optimizer=options), PARAMS)
    state = optimizer.init(PARAMS)
    first, state = optimizer.update(GRADIENT, state, PARAMS)
    second, state = optimizer.update(jax.tree.map(lambda g: 2 * g, GRADIENT), state, PARAMS)
    return (first, second), state


def test_adam_is_the_papers() -> None:
    """beta1 0.9, beta2 0.98, epsilon 1e-9 (section 5.3), with corrected bias (Kingma, Ba 2015)."""
    (first, second), _ = updates()
    gradient = np.array([[0.6, -0.3]])
    np.testing.assert_allclose(first["kernel"], -1 / WARMUP * np.sign(gradient), rtol=1e-5)
    mean = (0.9 * 0.1 * gradient + 0.1 * 2 * gradient) / (1 - 0.9**2)
    square = (0.98 * 0.02 * gradient**2 + 0.02 * (2 * gradient) ** 2) / (1 - 0.98**2)
    wanted = -2 / WARMUP * mean / (np.sqrt(square) + 1e-9)
    np.testing.assert_allclose(second["kernel"], wanted, rtol=1e-5)
    assert second["bias"][1] == 0


def test_clipping_is_by_global_norm() -> None:
    def means(clip_norm: float | None) -> Any:
        _, state = updates(clip_norm=clip_norm, b1=0.0)
        return optax.tree.get(state, "mu")

    norm = 2 * optax.tree.norm(GRADIENT)  # 1.4
    np.testing.assert_allclose(optax.tree.norm(means(None)), norm, rtol=1e-6)
    np.testing.assert_allclose(optax.tree.norm(means(1.5)), norm, rtol=1e-6)
    np.testing.assert_allclose(optax.tree.norm(means(0.5)), 0.5, rtol=1e-6)
    ratio = means(0.5)["kernel"] / GRADIENT["kernel"]
    np.testing.assert_allclose(ratio, means(0.5)["bias"][0] / GRADIENT["bias"][0], rtol=1e-6)


def test_weight_decay_is_decoupled() -> None:
    (plain, _), _ = updates()
    (decayed, _), _ = updates(weight_decay=0.1)
    wanted = plain["kernel"] - 1 / WARMUP * 0.1 * PARAMS["kernel"]
    np.testing.assert_allclose(decayed["kernel"], wanted, rtol=1e-5)
    np.testing.assert_array_equal(decayed["bias"], plain["bias"])


def test_weight_decay_leaves_norms_and_biases_alone() -> None:
    _, params = build(tiny(tied="none", positions="learned", output_bias=True, norm="pre"))
    config = Config(optimizer=OptimizerConfig(weight_decay=0.5, warmup=1))
    optimizer = make_optimizer(config, params)

    @jax.jit
    def update(params: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optimizer.update(zeros, optimizer.init(params), params)[0]

    moved = flat(jax.tree.map(np.any, update(params)))
    decayed = {name for name, changed in moved.items() if changed}
    matrices = ("kernel", "embedding", "positions", "output")
    assert decayed == {name for name in flat(params) if name.endswith(matrices)}


@pytest.mark.parametrize(
    ("layer", "shape", "inputs"),
    [("in", (8, 24), 1), ("query", (12, 2, 4), 1), ("out", (2, 4, 12), 2), ("out", (24, 8), 1)],
)
def test_muon_makes_the_momentum_of_a_matrix_nearly_orthogonal(
    layer: str, shape: tuple[int, ...], inputs: int
) -> None:
    """With the singular vectors of the gradient, and a root mean square near Adam's."""
    gradient = jax.random.normal(jax.random.key(1), shape)
    tree = {layer: {"kernel": gradient}}
    options = OptimizerConfig(kind="muon", schedule="inverse_sqrt", learning_rate=0.5, warmup=1)
    optimizer = make_optimizer(Config(optimizer=options), tree)
    updates: Any = optimizer.update(tree, optimizer.init(tree), tree)[0]
    matrix = (math.prod(shape[:inputs]), math.prod(shape[inputs:]))
    u, _, v = np.linalg.svd(np.asarray(gradient).reshape(matrix), full_matrices=False)
    scale = -0.5 * 0.2 * max(matrix) ** 0.5
    values = u.T @ np.asarray(updates[layer]["kernel"]).reshape(matrix) @ v.T / scale
    np.testing.assert_allclose(values, np.diag(np.diag(values)), atol=1e-4)
    assert np.diag(values).min() > 0.5  # as are those of five iterations (Jordan et al. 2024)
    assert np.diag(values).max() < 1.3


def test_muon_leaves_embeddings_norms_and_biases_to_adam() -> None:
    _, params = build(tiny(tied="none", positions="learned", output_bias=True, norm="pre"))
    optimizer = make_optimizer(Config(optimizer=OptimizerConfig(kind="muon")), params)
    state = jax.eval_shape(optimizer.init, params)
    paths = jax.tree.leaves(map_with_paths(lambda path, _: path, state))
    for name in flat(params):
        moments = sum(path.endswith(f"/{name}") for path in paths)
        assert moments == (1 if name.endswith("kernel") else 2), name  # Adam has two


@pytest.mark.parametrize(
    ("name", "end", "message"),
    [
        ("cosin", None, r"optimizer\.schedule='cosin': unknown; did you mean cosine"),
        ("linear", None, r"optimizer\.decay_steps=None: must be above .*warmup=4000"),
        ("noam", 9000, r"optimizer\.decay_steps=9000: must be None for the noam schedule, which"),
        ("mine", 9000, r"optimizer\.decay_steps=9000: must be None for the mine schedule, which"),
    ],
)
def test_schedules_that_do_not_fit_are_refused(
    name: str, end: int | None, message: str, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(SCHEDULES, "mine", Schedule(lambda step, _: 1 / step))
    with pytest.raises(UserError, match=message):
        check_config(Config(optimizer=OptimizerConfig(schedule=name, decay_steps=end)))


@pytest.mark.parametrize(
    ("limits", "last"),
    [
        ({"steps": 60}, None),
        ({"minutes": 1.0}, None),
        ({"steps": 90}, 90),
        ({"epochs": 30}, 150),
        ({"steps": 70, "epochs": 30}, 70),
        ({"steps": 50, "epochs": 30}, None),
    ],
)
def test_it_is_said_where_the_learning_rate_is_0(limits: dict[str, Any], last: int | None) -> None:
    options = OptimizerConfig(schedule="linear", warmup=5, decay_steps=60)
    line = "learning rate: 0 from step 60 on (optimizer.decay_steps)"
    line += f"; training to step {last} changes no parameter after it" if last else ""
    config = Config(optimizer=options, train=TrainConfig(**limits))
    assert describe_end(config, batches_per_epoch=5) == [line]
    assert describe_end(replace(config, optimizer=OptimizerConfig()), 5) == []


def test_patience_needs_a_development_corpus() -> None:
    config = Config(data=DataConfig(dev=()), train=TrainConfig(steps=9, patience=2))
    with pytest.raises(UserError, match=r"train\.patience=2: must be None where data\.dev=\(\)"):
        check_config(config)


def test_an_optimizer_of_ones_own(monkeypatch: Patch) -> None:
    """It is chosen by name, and follows the schedule; a name that is unknown is refused."""
    options = OptimizerConfig(kind="sgd", schedule="inverse_sqrt", learning_rate=0.5, warmup=1)
    config = Config(optimizer=options)
    unknown = r"optimizer\.kind='sgd': unknown; known: adam, muon; one of your own needs --import"
    with pytest.raises(UserError, match=unknown):
        make_optimizer(config, PARAMS)
    with pytest.raises(UserError, match=unknown):
        check_config(config)
    monkeypatch.setitem(OPTIMIZERS, "sgd", lambda config, rate, params: optax.sgd(rate))
    check_config(config)
    optimizer = make_optimizer(config, PARAMS)
    state, updates = optimizer.init(PARAMS), list[Any]()
    for _ in range(2):
        update, state = optimizer.update(GRADIENT, state, PARAMS)
        updates.append(update)
    for update, rate in zip(updates, (0.5, 0.5 / 2**0.5), strict=True):
        for name, gradient in GRADIENT.items():
            np.testing.assert_allclose(update[name], -rate * gradient, rtol=1e-6)
