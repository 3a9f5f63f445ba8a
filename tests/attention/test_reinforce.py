"""REINFORCE, the auxiliary loss of sampled choices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.attention.reinforce import reinforce, reinforce_to_go
from transformer_jax.types import Outcome


def outcome(reward: Any, is_token: Any, baseline: float) -> Outcome:
    return Outcome(reward, is_token, {"log_likelihood": jnp.asarray(baseline)})


def test_it_is_the_gradient_of_the_expected_reward() -> None:
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
        return reinforce_to_go(chosen, nothing, outcome(reward, real, baseline))

    # Position 0's reward must not depend on what is chosen after it, as in decoding.
    rewards = rewards.at[0].set(rewards[0, :, :1])
    wanted = -jax.grad(expected)(logits)
    for baseline in (0.0, 1.5):
        found = sum(chance(logits, c) * jax.grad(estimate)(logits, c, baseline) for c in choices)
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_it_adds_no_loss_and_spares_padding() -> None:
    draw = jax.random.normal(jax.random.key(0), (3, 2, 4))
    real = jnp.array([[True, True, False, False], [True, False, False, False]])

    def total(chosen: Any, entropy: Any) -> Any:
        return reinforce(chosen, entropy, outcome(draw[2], real, 0.5))

    assert total(draw[0], draw[1]) == 0
    of_choice, of_entropy = jax.grad(total, argnums=(0, 1))(draw[0], draw[1])
    np.testing.assert_allclose(of_choice, jnp.where(real, 0.5 - draw[2], 0), atol=1e-6)
    np.testing.assert_allclose(of_entropy, jnp.where(real, -1.0, 0))
