"""Label-smoothed cross entropy and auxiliary losses, as sums."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from common import build, make_batch, tiny
from jax.tree_util import Partial

from transformer_jax.special_ids import PAD
from transformer_jax.training.losses import auxiliary_losses, symmetric_divergence, token_loss
from transformer_jax.training.step import loss_fn
from transformer_jax.types import ModelOutput, Outcome

LOGITS = 3 * jax.random.normal(jax.random.key(0), (4, 5, 11))
TARGETS = jnp.array([[3, 4, 2, 0, 0], [9, 10, 8, 7, 2], [2, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
REAL = TARGETS != PAD


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_it_is_optax(smoothing: float) -> None:
    labels = optax.smooth_labels(jax.nn.one_hot(TARGETS, 11), smoothing)
    wanted = optax.softmax_cross_entropy(LOGITS, labels)[REAL].sum()
    total, count = token_loss(LOGITS, TARGETS, smoothing)
    np.testing.assert_allclose(total, wanted, rtol=1e-6)
    assert count == 9


def test_padding_has_no_loss_and_no_gradient() -> None:
    gradient = jax.grad(lambda logits: token_loss(logits, TARGETS, 0.1)[0])(LOGITS)
    assert not gradient[~REAL].any()
    assert gradient[REAL].all()
    assert token_loss(LOGITS[3:], TARGETS[3:], 0.1) == (0, 0)


def test_it_is_float32_from_bfloat16() -> None:
    low = LOGITS.astype(jnp.bfloat16)
    total, _ = token_loss(low, TARGETS, 0.1)
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, token_loss(low.astype(jnp.float32), TARGETS, 0.1)[0])


def test_divergence_of_adjacent_rows_is_optaxs_both_ways() -> None:
    targets = jnp.repeat(TARGETS[::2], 2, axis=0)
    log_p, log_q = (jax.nn.log_softmax(LOGITS[i::2]) for i in range(2))
    divergence = optax.losses.kl_divergence_with_log_targets
    wanted = (divergence(log_p, log_q) + divergence(log_q, log_p))[targets[::2] != PAD]
    assert wanted.shape == (4,)
    np.testing.assert_allclose(symmetric_divergence(LOGITS, targets), wanted.sum(), rtol=1e-5)
    assert symmetric_divergence(jnp.repeat(LOGITS[:2], 2, axis=0), targets) == 0
    gradient = jax.grad(symmetric_divergence)(LOGITS, targets)
    assert gradient[targets != PAD].all()
    assert not gradient[targets == PAD].any()


def test_r_drop_computes_each_pair_twice() -> None:
    """The two rows of a pair differ in dropout alone, its tokens count once, and evaluation is as
    without it."""
    model, params = build(tiny(dropout=0.1))
    batch, key = make_batch([(7, 6), (3, 2), (1, 1), (0, 0)]), jax.random.key(0)
    batch = jax.tree.map(jnp.asarray, batch)
    twice = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), batch)
    plain, r_drop = (jax.jit(loss_fn(model, 0.1, weight)) for weight in (0.0, 3.0))
    total, (tokens, _) = r_drop(params, batch, key, {})
    smoothed, (wanted, _) = plain(params, twice, key, {})
    output: Any = jax.jit(model.apply)({"params": params}, twice, key)
    divergence = symmetric_divergence(output.logits, twice.target_out)
    assert divergence > 0.01
    np.testing.assert_allclose(total, (smoothed + 1.5 * divergence) / 2, rtol=1e-5)
    assert 2 * tokens == wanted == 18
    for ours, alone in zip(*(f(params, batch, None, {}) for f in (r_drop, plain)), strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, alone)


def test_auxiliary_losses_depend_on_how_likely_tokens_were() -> None:
    def loss(factor: jax.Array, outcome: Outcome) -> jax.Array:
        gain = outcome.log_likelihood - outcome.averages["log_likelihood"]
        return factor * jnp.sum(jnp.where(outcome.is_token, gain, 0))

    losses = {"a": Partial(loss, jnp.asarray(2.0)), "b": Partial(loss, jnp.asarray(1.0))}
    output = ModelOutput(LOGITS, losses, {}, {})
    total, metrics = auxiliary_losses(output, TARGETS, {"log_likelihood": jnp.asarray(-4.0)})
    plain, count = token_loss(LOGITS, TARGETS)
    np.testing.assert_allclose(total, 3 * (4.0 * count - plain), rtol=1e-5)
    mean = metrics["log_likelihood"]
    np.testing.assert_allclose(mean.total, -plain, rtol=1e-6)
    assert mean.weight == count
    none = auxiliary_losses(ModelOutput(LOGITS, {}, {}, {}), TARGETS, {})
    assert none == (0, {})
