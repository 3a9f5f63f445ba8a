"""The kinds of attention as pure functions: query, keys, values and a mask to context and weights.

Shapes may have any leading axes, the same for all arrays. `mask` is True where a query may see a
key; None: everywhere. A query that sees no key gets weights and context 0.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from transformer_jax.attention.scores import dot, scaled_dot
from transformer_jax.types import Key

Score = Callable[[Array, Array], Array]
"""(query [..., T, H], keys [..., S, H]) -> scores [..., T, S]; see scores.py."""

ContextAndWeights = tuple[Float[Array, "*B T H"], Float[Array, "*B T S"]]
"""What attention gives: each query's sum of the values, and the weights of that sum."""


def masked_softmax(
    scores: Float[Array, "*B T S"], mask: Bool[Array, "..."] | None
) -> Float[Array, "*B T S"]:
    """exp(score) over its sum, in float32, over the keys that are seen; 0 where there are none."""
    scores = scores.astype(jnp.float32)
    if mask is None:
        return jax.nn.softmax(scores)
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min))
    return jnp.where(jnp.any(mask, axis=-1, keepdims=True), weights, 0)


def weighted_sum(
    weights: Float[Array, "*B T S"], values: Float[Array, "*B S H"]
) -> Float[Array, "*B T H"]:
    """Σₛ weightsₛ · valuesₛ, in the type of the values."""
    return jnp.einsum("...ts,...sh->...th", weights.astype(values.dtype), values)


def soft_attention(
    query: Float[Array, "*B T H"],
    keys: Float[Array, "*B S H"],
    values: Float[Array, "*B S H"],
    mask: Bool[Array, "..."] | None = None,
    *,
    score: Score = scaled_dot,
) -> ContextAndWeights:
    """Every value counts: softmax(score(q, k)) (Bahdanau et al. 2015; Vaswani et al. 2017, eq. 1).

    Global attention in the words of Luong et al. 2015, section 3.1.
    """
    weights = masked_softmax(score(query, keys), mask)
    return weighted_sum(weights, values), weights


def plain_self_attention(
    x: Float[Array, "*B S H"], mask: Bool[Array, "..."] | None = None
) -> ContextAndWeights:
    """softmax(x·x) x: each vector's mean of those like it, with nothing to learn."""
    return soft_attention(x, x, x, mask, score=dot)


def hard_attention(
    query: Float[Array, "*B T H"],
    keys: Float[Array, "*B S H"],
    values: Float[Array, "*B S H"],
    mask: Bool[Array, "..."] | None = None,
    *,
    score: Score = scaled_dot,
    key: Key | None = None,
) -> ContextAndWeights:
    """One value is picked: sampled from the soft weights with `key`, the likeliest without.

    The weights are 1 there and 0 elsewhere; no gradient passes the choice. (Xu et al. 2015,
    section 4.1)
    """
    weights = one_hot_choice(masked_softmax(score(query, keys), mask), key)
    return weighted_sum(weights, values), weights


def gumbel_attention(
    query: Float[Array, "*B T H"],
    keys: Float[Array, "*B S H"],
    values: Float[Array, "*B S H"],
    mask: Bool[Array, "..."] | None = None,
    *,
    score: Score = scaled_dot,
    key: Key | None = None,
    temperature: float = 1.0,
) -> ContextAndWeights:
    """Hard attention whose gradient is that of the softmax at `temperature` with Gumbel noise.

    Straight-through: a biased estimate, but of little variance. (Jang et al. 2017, section 2.2)
    ValueError: a temperature that is not above 0.
    """
    if isinstance(temperature, int | float) and temperature <= 0:  # it may be traced
        raise ValueError(f"temperature={temperature}: must be above 0")
    logits = masked_softmax(score(query, keys), mask)
    soft = jnp.log(jnp.maximum(logits, jnp.finfo(jnp.float32).tiny))
    if key is not None:
        soft += jax.random.gumbel(key, soft.shape)
    soft = masked_softmax(soft / temperature, mask)
    hard = one_hot_choice(soft, None)
    weights = hard + soft - jax.lax.stop_gradient(soft)
    return weighted_sum(weights, values), weights


def one_hot_choice(weights: Float[Array, "*B T S"], key: Key | None) -> Float[Array, "*B T S"]:
    """1 at the key that is picked: with probability `weights`, or without `key` the largest."""
    chances = jax.lax.stop_gradient(weights)
    if key is None:
        index = jnp.argmax(chances, axis=-1)
    else:
        index = jax.random.categorical(key, jnp.log(chances))
    some = jnp.any(chances > 0, axis=-1, keepdims=True)
    return jnp.where(some, jax.nn.one_hot(index, weights.shape[-1], dtype=jnp.float32), 0)


def local_m_attention(
    query: Float[Array, "*B T H"],
    keys: Float[Array, "*B S H"],
    values: Float[Array, "*B S H"],
    mask: Bool[Array, "..."] | None = None,
    *,
    window: int,
    score: Score = scaled_dot,
) -> ContextAndWeights:
    """Soft attention in a window [t - D, t + D] around the query's own position t, D = `window`.

    Luong et al. 2015, section 3.2, "monotonic alignment"; in self-attention, a sliding window.
    ValueError: D below 1.
    """
    distance = jnp.arange(keys.shape[-2])[None] - jnp.arange(query.shape[-2])[:, None]
    near = jnp.abs(distance) <= _at_least_one(window)
    return soft_attention(query, keys, values, near if mask is None else mask & near, score=score)


def local_p_attention(
    query: Float[Array, "*B T H"],
    keys: Float[Array, "*B S H"],
    values: Float[Array, "*B S H"],
    mask: Bool[Array, "..."] | None = None,
    *,
    centre: Float[Array, "*B T"],
    window: int,
    key_positions: Array | None = None,
    score: Score = scaled_dot,
) -> ContextAndWeights:
    """Soft attention in a window [p - D, p + D] around a predicted position p = `centre`.

    The weights are multiplied by exp(-(s - p)² / 2σ²) with σ = D / 2 after the softmax, and not
    normalised again. (Luong et al. 2015, section 3.2, eq. 10; for p see `predicted_centre`)
    ValueError: D below 1.
    """
    positions = jnp.arange(keys.shape[-2]) if key_positions is None else key_positions
    positions = jnp.expand_dims(positions, range(centre.ndim + 1 - positions.ndim))
    distance = positions.astype(centre.dtype) - centre[..., None]
    near = jnp.abs(distance) <= _at_least_one(window)
    seen = near if mask is None else near & jnp.broadcast_to(mask, near.shape)
    weights = masked_softmax(score(query, keys), seen)
    weights = weights * jnp.exp(-2 * jnp.square(distance / window))
    return weighted_sum(weights, values), weights


def _at_least_one(window: int) -> int:
    if window < 1:
        raise ValueError(f"window={window}: must be at least 1")
    return window


def predicted_centre(
    query: Float[Array, "*B T H"],
    lengths: Float[Array, "..."],  # [*B, T], or what broadcasts to it
    w: Float[Array, "*N H H"],
    v: Float[Array, "*N H"],
) -> Float[Array, "*B T"]:
    """p = S · sigmoid(v·tanh(W q)), S being the sentence's `lengths` (Luong et al. 2015, eq. 9)."""
    hidden = jnp.tanh(query @ w)
    where = jnp.einsum("...th,...h->...t", hidden, v, preferred_element_type=jnp.float32)
    return lengths * jax.nn.sigmoid(where)


def latent_attention(
    query: Float[Array, "*B T H"],
    keys: Float[Array, "*B S H"],
    values: Float[Array, "*B S H"],
    mask: Bool[Array, "..."] | None = None,
    *,
    active: Float[Array, "*B S S"],
    score: Score = scaled_dot,
) -> ContextAndWeights:
    """The weights of a second attention, averaged by those of a first.

    The first, latent, weights say which tokens are telling (a "to", a "when"): l = softmax(score).
    Given that token i is, row i of `active` says which ones to look at, and the weights are
    w = l · active. (Chen et al. 2016, section 3)

    `mask` is for the latent weights: if rows of `active` have weight on hidden keys, so has w.
    """
    weights = masked_softmax(score(query, keys), mask) @ active
    return weighted_sum(weights, values), weights
