"""Masks, and what the reference kernel returns beside its output."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from transformer_jax.attention import Mask, attend, padding_mask
from transformer_jax.special_ids import PAD

pytestmark = pytest.mark.usefixtures("strict")


Inputs = tuple[Array, Array, Array]


def inputs(dtype: Any = jnp.float32, scale: float = 1.0) -> Inputs:
    """A query [2, 3, 4, 6] and a key and value [2, 3, 5, 6]."""

    def draw(seed: int, length: int) -> Array:
        normal = jax.random.normal(jax.random.key(seed), (2, 3, length, 6))
        return (scale * normal).astype(dtype)

    return draw(0, 4), draw(1, 5), draw(2, 5)


def random_mask() -> Array:
    """Some keys hidden from each query [2, 1, 4, 5]; the first query of all sees none."""
    return jax.random.bernoulli(jax.random.key(3), 0.6, (2, 1, 4, 5)).at[0, 0, 0].set(False)


def test_softmax_is_float32_in_bfloat16() -> None:
    low = query, key, value = inputs(jnp.bfloat16)
    output, weights = attend(*low, random_mask(), kernel="reference")
    assert output.dtype == jnp.bfloat16
    assert weights is not None
    assert weights.dtype == jnp.float32
    # As exact as float32 from the same rounded inputs, but for the rounding of weights and output.
    float32 = (query.astype(jnp.float32), key.astype(jnp.float32), value.astype(jnp.float32))
    _, exact = attend(*float32, random_mask(), kernel="reference")
    assert exact is not None
    np.testing.assert_allclose(weights, exact, atol=1e-6)


def test_dropout_changes_what_is_used_and_not_what_is_returned() -> None:
    query, key, value = inputs()
    output, weights = attend(query, key, value, None, dropout=lambda w: w.at[..., 0].set(0.0))
    _, plain = attend(query, key, value, None, kernel="reference")
    assert weights is not None
    np.testing.assert_array_equal(weights, plain)
    used = weights.at[..., 0].set(0.0)
    np.testing.assert_allclose(output, jnp.einsum("bnts,bnsh->bnth", used, value), atol=1e-6)


def test_masks() -> None:
    ids = jnp.array([[5, 4, 2, 0], [2, 0, 0, 0]])
    seen = padding_mask(ids).dense(3, 4)
    np.testing.assert_array_equal(seen, np.broadcast_to((ids != PAD)[:, None, None], seen.shape))
    np.testing.assert_array_equal(Mask(causal=True).dense(4, 4)[0, 0], np.tri(4, dtype=bool))
    band = np.abs(np.arange(5) - np.arange(4)[:, None]) <= 1
    np.testing.assert_array_equal(Mask(window=1).dense(4, 5)[0, 0], band)
    segments, keys = jnp.array([[1, 1, 2, 0]]), jnp.array([[1, 2, 2, 0, 0]])
    mask = Mask(query_segments=segments, key_segments=keys)
    wanted = [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(mask.dense(4, 5)[0, 0], np.array(wanted, bool))
    first, length = mask.sentences(4, 5)
    np.testing.assert_array_equal(first, [[0, 0, 1, 0]])
    np.testing.assert_array_equal(length, [[1, 1, 2, 0]])
    # Positions that start anew in each segment: the window is within the sentence.
    ours, theirs = jnp.array([[0, 1, 0, 0]]), jnp.array([[0, 0, 1, 0, 0]])
    near = Mask(segments, ours, keys, theirs)
    wanted[1] = [0, 0, 0, 0, 0]
    wanted[2] = [0, 1, 0, 0, 0]
    np.testing.assert_array_equal(replace(near, window=0).dense(4, 5)[0, 0], np.array(wanted, bool))
