"""Each kind of attention as a pure function of query, keys, values and mask.

Each returns the context and the weights. Arrays may have any leading axes, which must be the same
for all. A query that may attend to no key has weights and context 0.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from transformer_jax.attention.masks import Mask
from transformer_jax.attention.scores import Keys, Matrix, Queries, Vector, Weights, dot, scaled_dot
from transformer_jax.errors import UserError
from transformer_jax.types import Key

Visible = Bool[Array, "..."] | None
"""True where a query may attend to a key; None: everywhere."""

ScoreFn = Callable[[Array, Array], Array]
"""A function (query [..., T, H], keys [..., S, H]) -> scores [..., T, S] as in scores.py."""


class ContextAndWeights(NamedTuple):
    """Each query's weighted sum of the values, and the attention weights."""

    context: Queries
    weights: Any  # Float[Array, "*B T S"]; None: a kernel that does not compute them


def masked_softmax(scores: Weights, mask: Visible) -> Weights:
    """Returns the softmax in float32 over the unmasked keys; 0 for queries without any."""
    scores = scores.astype(jnp.float32)
    if mask is None:
        return jax.nn.softmax(scores)
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min))
    return jnp.where(jnp.any(mask, axis=-1, keepdims=True), weights, 0)


def weighted_sum(weights: Weights, values: Keys) -> Queries:
    """Returns Σₛ weightsₛ · valuesₛ in the type of the values."""
    return jnp.einsum("...ts,...sh->...th", weights.astype(values.dtype), values)


def soft_attention(
    query: Queries, keys: Keys, values: Keys, mask: Visible = None, *, score: ScoreFn = scaled_dot
) -> ContextAndWeights:
    """Returns soft attention: weights softmax(score(q, k)) over all keys.

    (Bahdanau et al. 2015; Vaswani et al. 2017, eq. 1; "global attention" in Luong et al. 2015,
    section 3.1)
    """
    weights = masked_softmax(score(query, keys), mask)
    return ContextAndWeights(weighted_sum(weights, values), weights)


def plain_self_attention(x: Keys, mask: Visible = None) -> ContextAndWeights:
    """Returns softmax(x·x) x: the mean of similar vectors, without parameters."""
    return soft_attention(x, x, x, mask, score=dot)


def hard_attention(
    query: Queries,
    keys: Keys,
    values: Keys,
    mask: Visible = None,
    *,
    score: ScoreFn = scaled_dot,
    key: Key | None = None,
) -> ContextAndWeights:
    """Returns hard attention: one value, sampled with the soft weights as probabilities.

    Without `key` it is the most likely value. The weights are one-hot, and no gradient passes
    through the choice. (Xu et al. 2015, section 4.1)
    """
    weights = one_hot_choice(masked_softmax(score(query, keys), mask), key)
    return ContextAndWeights(weighted_sum(weights, values), weights)


def gumbel_attention(
    query: Queries,
    keys: Keys,
    values: Keys,
    mask: Visible = None,
    *,
    score: ScoreFn = scaled_dot,
    key: Key | None = None,
    temperature: float = 1.0,
) -> ContextAndWeights:
    """Returns hard attention with the gradient of a softmax with Gumbel noise at `temperature`.

    This straight-through estimator is biased and has a low variance. (Jang et al. 2017, section
    2.2) UserError: `temperature` is not above 0.
    """
    if isinstance(temperature, int | float) and temperature <= 0:  # a traced one is not checked
        raise UserError(f"temperature={temperature}: must be above 0")
    logits = masked_softmax(score(query, keys), mask)
    soft = jnp.log(jnp.maximum(logits, jnp.finfo(jnp.float32).tiny))
    if key is not None:
        soft += jax.random.gumbel(key, soft.shape)
    soft = masked_softmax(soft / temperature, mask)
    hard = one_hot_choice(soft, None)
    weights = hard + soft - jax.lax.stop_gradient(soft)
    return ContextAndWeights(weighted_sum(weights, values), weights)


def one_hot_choice(weights: Weights, key: Key | None) -> Weights:
    """Returns one-hot weights: a key sampled with probability `weights`; the largest without `key`.

    They are 0 for a query whose weights are all 0.
    """
    probabilities = jax.lax.stop_gradient(weights)
    if key is None:
        index = jnp.argmax(probabilities, axis=-1)
    else:
        index = jax.random.categorical(key, jnp.log(probabilities))
    has_keys = jnp.any(probabilities > 0, axis=-1, keepdims=True)
    return jnp.where(has_keys, jax.nn.one_hot(index, weights.shape[-1], dtype=jnp.float32), 0)


def local_m_attention(
    query: Queries,
    keys: Keys,
    values: Keys,
    mask: Visible = None,
    *,
    window: int,
    score: ScoreFn = scaled_dot,
) -> ContextAndWeights:
    """Returns soft attention in [t - D, t + D] around the query's position t, with D = `window`.

    This is the "monotonic alignment" of Luong et al. 2015, section 3.2, and in self-attention a
    sliding window. UserError: D is below 1.
    """
    near = Mask(window=_at_least_one(window)).dense(query.shape[-2], keys.shape[-2])[0, 0]
    return soft_attention(query, keys, values, near if mask is None else mask & near, score=score)


def local_p_attention(
    query: Queries,
    keys: Keys,
    values: Keys,
    mask: Visible = None,
    *,
    center: Float[Array, "*B T"],
    window: int,
    key_positions: Array | None = None,
    score: ScoreFn = scaled_dot,
) -> ContextAndWeights:
    """Returns soft attention in [p - D, p + D] around a predicted position p = `center`.

    After the softmax the weights are multiplied by exp(-(s - p)² / 2σ²) with σ = D / 2 and not
    normalized again. (Luong et al. 2015, section 3.2, eq. 10; for p see `predicted_center`)
    UserError: D is below 1.
    """
    positions = jnp.arange(keys.shape[-2]) if key_positions is None else key_positions
    positions = jnp.expand_dims(positions, range(center.ndim + 1 - positions.ndim))
    distance = positions.astype(center.dtype) - center[..., None]
    near = jnp.abs(distance) <= _at_least_one(window)
    visible = near if mask is None else near & jnp.broadcast_to(mask, near.shape)
    weights = masked_softmax(score(query, keys), visible)
    weights = weights * jnp.exp(-2 * jnp.square(distance / window))
    return ContextAndWeights(weighted_sum(weights, values), weights)


def _at_least_one(window: int) -> int:
    if window < 1:
        raise UserError(f"window={window}: must be at least 1")
    return window


def predicted_center(
    query: Queries, lengths: Float[Array, "..."], w: Matrix, v: Vector
) -> Float[Array, "*B T"]:
    """Returns p = S · sigmoid(v·tanh(W q)) in a sentence of length S (Luong et al. 2015, eq. 9).

    lengths: S, which broadcasts to [*B, T].
    """
    # In float32: bfloat16 has too few bits for a position in a long sentence.
    hidden = jnp.tanh(query @ w)
    logits = jnp.einsum("...th,...h->...t", hidden, v, preferred_element_type=jnp.float32)
    return lengths * jax.nn.sigmoid(logits)


def latent_attention(
    query: Queries,
    keys: Keys,
    values: Keys,
    mask: Visible = None,
    *,
    active: Float[Array, "*B S S"],
    score: ScoreFn = scaled_dot,
) -> ContextAndWeights:
    """Returns attention in two stages: the rows of `active`, averaged with latent weights.

    The latent weights l = softmax(score) find indicative tokens, such as "to" or "when". Row i of
    `active` says which tokens matter if token i is indicative, and the weights are w = l · active.
    (Chen et al. 2016, section 3)

    `mask` applies to the latent weights only: if `active` has weight on masked keys, so has w.
    """
    weights = masked_softmax(score(query, keys), mask) @ active
    return ContextAndWeights(weighted_sum(weights, values), weights)
