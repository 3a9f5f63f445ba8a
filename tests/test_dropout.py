"""The masks of dropout are as good as coin tosses, and the same however arrays are sharded."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from transformer_jax.dropout import dropout, keep_mask, realized_rate

RATE = realized_rate(0.3)
LIMIT = 5.5
"""Standard deviations that a fair mask passes with a probability of 4e-8."""


def tosses(key: Any, shape: tuple[int, ...], rate: float = RATE) -> np.ndarray:
    """Dropped elements of a mask with mean 0 and variance 1."""
    dropped = 1.0 - np.asarray(keep_mask(key, shape, rate))
    return (dropped - rate) / math.sqrt(rate * (1 - rate))


def assert_fair(products: np.ndarray) -> None:
    """The sum of numbers with mean 0 and variance 1 is one that chance explains."""
    assert abs(products.sum()) < LIMIT * math.sqrt(products.size)


@pytest.mark.parametrize("asked", [0.001, 0.1, 0.3, 0.5, 0.9, 0.9999])
def test_realized_rate_is_the_nearest_that_bytes_have(asked: float) -> None:
    rate = realized_rate(asked)
    assert rate * 256 == int(rate * 256)
    assert rate < 1
    assert abs(rate - asked) <= 1 / 256


@pytest.mark.parametrize("rate", [1 / 256, 26 / 256, 0.5, 255 / 256])
def test_rate(rate: float) -> None:
    assert_fair(tosses(jax.random.key(0), (1000, 1000), rate))


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 130), (2, 2, 3, 33)])
def test_rate_of_each_element(shape: tuple[int, ...]) -> None:
    count = 4000
    keys = jax.random.split(jax.random.key(1), count)
    masks = jax.vmap(lambda key: keep_mask(key, shape, RATE))(keys)
    assert masks.shape == (count, *shape)
    deviation = math.sqrt(RATE * (1 - RATE) / count)
    assert np.abs(np.asarray(masks).mean(0) - (1 - RATE)).max() < LIMIT * deviation


def test_rows_columns_and_neighbors_are_independent() -> None:
    mask = tosses(jax.random.key(2), (500, 509))
    for lag in (1, 2, 3, 4, 5, 8, 64, 128, 256):
        assert_fair(mask[lag:] * mask[:-lag])
        assert_fair(mask[:, lag:] * mask[:, :-lag])
    assert_fair(mask[1:, 1:] * mask[:-1, :-1])


def test_sums_of_rows_and_columns_vary_as_they_should() -> None:
    mask = tosses(jax.random.key(3), (512, 512))
    for axis in (0, 1):
        squares = np.square(mask.sum(axis)) / mask.shape[axis]
        assert_fair((squares - 1) / math.sqrt(2))


def test_masks_are_not_periodic() -> None:
    count = 2**19
    mask = tosses(jax.random.key(4), (count,))
    spectrum = np.fft.rfft(mask, 2 * count)
    correlation = np.fft.irfft(np.abs(spectrum) ** 2)[1 : count // 2]
    deviation = np.sqrt(np.arange(count - 1, count // 2, -1))
    assert np.abs(correlation / deviation).max() < LIMIT + 0.5  # the largest of 260,000


@pytest.mark.parametrize("rate", [26 / 256, RATE, 0.5])
def test_masks_of_different_keys_are_independent(rate: float) -> None:
    root = jax.random.key(0)
    pairs = [(root, jax.random.key(2**i)) for i in range(0, 32, 3)]
    pairs += [(jax.random.fold_in(root, i), jax.random.fold_in(root, i + 1)) for i in range(8)]
    data = [[(0, 0), (2**i, 0)] for i in range(0, 32, 5)]
    pairs += [tuple(jax.random.wrap_key_data(jnp.array(d, jnp.uint32))) for d in data]
    for one, other in pairs:
        assert_fair(tosses(one, (256, 256), rate) * tosses(other, (256, 256), rate))


def test_shapes_and_keys_decide_the_mask() -> None:
    key = jax.random.key(5)
    np.testing.assert_array_equal(keep_mask(key, (64, 60), RATE), keep_mask(key, (64, 60), RATE))
    wide = keep_mask(key, (64, 64), RATE)
    assert np.any(wide != keep_mask(jax.random.key(6), (64, 64), RATE))
    assert_fair(tosses(key, (64, 64))[1:, :60] * tosses(key, (64, 60))[1:])


def test_values_are_dropped_or_divided_by_what_is_realized() -> None:
    x = jnp.full((600, 601), 2.0)
    y = np.asarray(dropout(x, 0.1, jax.random.key(7)))
    np.testing.assert_allclose(np.unique(y), [0.0, 2 / (1 - 26 / 256)], rtol=1e-6)
    assert abs(y.mean() - 2) < LIMIT * y.std() / math.sqrt(y.size)


def test_dropout_keeps_type_and_passes_gradients_of_what_is_kept() -> None:
    x = jnp.full((8, 9), 2.0, jnp.bfloat16)
    assert dropout(x, 0.5, jax.random.key(0)).dtype == jnp.bfloat16
    ones = jnp.ones((8, 9))
    gradient = jax.grad(lambda x: dropout(x, 0.5, jax.random.key(0)).sum())(ones)
    np.testing.assert_array_equal(gradient, dropout(ones, 0.5, jax.random.key(0)))


def test_no_key_or_no_rate_is_no_dropout() -> None:
    x = jnp.ones((4, 4))
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


def test_masks_do_not_depend_on_sharding() -> None:
    x = jnp.ones((16, 8, 13))
    run = jax.jit(lambda x, key: dropout(x, 0.5, key))
    alone = run(x, jax.random.key(0))
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for spec in (PartitionSpec("a"), PartitionSpec("b", "a"), PartitionSpec(("a", "b"))):
        spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        assert len(spread.sharding.device_set) == 8
        np.testing.assert_array_equal(run(spread, jax.random.key(0)), alone)
