"""Label-smoothed cross entropy as a sum and a count."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax.loss import reinforce, token_loss

LOGITS = 3 * jax.random.normal(jax.random.key(0), (4, 5, 11))
TARGETS = jnp.array([[3, 4, 2, 0, 0], [9, 10, 8, 7, 2], [2, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
REAL = TARGETS > 0


def test_without_smoothing_it_is_optax() -> None:
    total, count = token_loss(LOGITS, TARGETS)
    wanted = optax.softmax_cross_entropy_with_integer_labels(LOGITS, TARGETS)[REAL]
    np.testing.assert_allclose(total, wanted.sum(), rtol=1e-6)
    assert count == wanted.size == 9


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_smoothed_it_is_optax(smoothing: float) -> None:
    labels = optax.smooth_labels(jax.nn.one_hot(TARGETS, 11), smoothing)
    wanted = optax.softmax_cross_entropy(LOGITS, labels)[REAL].sum()
    np.testing.assert_allclose(token_loss(LOGITS, TARGETS, smoothing)[0], wanted, rtol=1e-6)


def test_sums_add_over_splits() -> None:
    whole = token_loss(LOGITS, TARGETS, 0.1)
    parts = [token_loss(LOGITS[i::2], TARGETS[i::2], 0.1) for i in range(2)]
    np.testing.assert_allclose(whole[0], parts[0][0] + parts[1][0], rtol=1e-6)
    assert whole[1] == parts[0][1] + parts[1][1]


def test_padding_has_no_loss_and_no_gradient() -> None:
    gradient = jax.grad(lambda logits: token_loss(logits, TARGETS, 0.1)[0])(LOGITS)
    assert not gradient[~REAL].any()
    assert gradient[REAL].all()
    assert token_loss(LOGITS[3:], TARGETS[3:], 0.1) == (0, 0)


def test_lowest_loss_is_the_entropy_of_the_smoothed_labels() -> None:
    label = np.full(11, 0.1 / 11)
    label[3] += 0.9
    logits = jnp.asarray(np.log(label), jnp.float32)[None, None]
    total, _ = token_loss(logits, jnp.array([[3]]), 0.1)
    np.testing.assert_allclose(total, -(label * np.log(label)).sum(), rtol=1e-6)


def test_it_is_float32_from_bfloat16() -> None:
    low = LOGITS.astype(jnp.bfloat16)
    total, _ = token_loss(low, TARGETS, 0.1)
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, token_loss(low.astype(jnp.float32), TARGETS, 0.1)[0])


def test_reinforce_is_the_gradient_of_the_expected_reward() -> None:
    """Enumerated: three choices at each of two positions, a reward for each pair of choices."""
    logits = jax.random.normal(jax.random.key(0), (2, 3))
    rewards = jax.random.normal(jax.random.key(1), (2, 3, 3))  # of both positions
    real = jnp.ones((1, 2), bool)

    def log_probability(logits: Any, choice: tuple[int, int]) -> Any:
        return jnp.stack([jax.nn.log_softmax(logits[t])[choice[t]] for t in range(2)])[None]

    def chance(logits: Any, choice: tuple[int, int]) -> Any:
        return jnp.exp(jnp.sum(log_probability(logits, choice)))

    choices = [(i, j) for i in range(3) for j in range(3)]

    def expected(logits: Any) -> Any:
        return sum(chance(logits, c) * jnp.sum(rewards[:, c[0], c[1]]) for c in choices)

    def estimate(logits: Any, choice: tuple[int, int], baseline: float) -> Any:
        reward = rewards[:, choice[0], choice[1]][None]
        chosen, nothing = log_probability(logits, choice), jnp.zeros((1, 2))
        return reinforce(chosen, nothing, reward, jnp.asarray(baseline), real, ahead=True)

    # Position 0's reward must not depend on what is chosen after it, as in decoding.
    rewards = rewards.at[0].set(rewards[0, :, :1])
    wanted = -jax.grad(expected)(logits)
    for baseline in (0.0, 1.5):
        found = sum(chance(logits, c) * jax.grad(estimate)(logits, c, baseline) for c in choices)
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_reinforce_adds_no_loss_and_spares_padding() -> None:
    draw = jax.random.normal(jax.random.key(0), (3, 2, 4))
    real = jnp.array([[True, True, False, False], [True, False, False, False]])

    def total(chosen: Any, entropy: Any) -> Any:
        return reinforce(chosen, entropy, draw[2], jnp.asarray(0.5), real, ahead=False)

    assert total(draw[0], draw[1]) == 0
    of_choice, of_entropy = jax.grad(total, argnums=(0, 1))(draw[0], draw[1])
    np.testing.assert_allclose(of_choice, jnp.where(real, 0.5 - draw[2], 0), atol=1e-6)
    np.testing.assert_allclose(of_entropy, jnp.where(real, -1.0, 0))
