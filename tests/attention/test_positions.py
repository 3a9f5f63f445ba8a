"""Rotary positions and the biases on scores, against loops over the formulas."""

import cmath
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.attention.positions import RelativeBias, alibi, relative_bucket, rotate

pytestmark = pytest.mark.usefixtures("strict")


def test_rotation_is_a_product_of_complex_numbers() -> None:
    """Column pairs as complex numbers, times exp(i · position · 10000^(-2j/H))."""
    x = jax.random.normal(jax.random.key(0), (2, 3, 5, 6))
    positions = jnp.array([[0, 1, 2, 3, 4], [7, 100, 0, 3, 900]])
    rotated = rotate(x, positions, length=901)
    for b, n, t, j in np.ndindex(2, 3, 5, 3):
        pair = complex(*np.asarray(x[b, n, t, 2 * j : 2 * j + 2], np.float64))
        turned = pair * cmath.exp(1j * int(positions[b, t]) * 10000.0 ** (-2 * j / 6))
        wanted = (turned.real, turned.imag)
        np.testing.assert_allclose(rotated[b, n, t, 2 * j : 2 * j + 2], wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (8, [2.0**-n for n in range(1, 9)]),
    ],
)
def test_alibi_is_slopes_times_distances(heads: int, slopes: list[float]) -> None:
    """Slopes as in the paper for 8 heads, and in its code for numbers that are no power of 2."""
    queries, keys = jnp.array([[0, 1, 5]]), jnp.array([[0, 2, 3, 9]])
    bias = alibi(queries, keys, heads)
    assert bias.shape == (1, heads, 3, 4)
    for n, t, s in np.ndindex(heads, 3, 4):
        assert bias[0, n, t, s] == -slopes[n] * abs(int(queries[0, t]) - int(keys[0, s]))


def bucket_by_hand(distance: int, both_sides: bool, buckets: int, furthest: int) -> int:
    """Half of a side's buckets hold one distance each; the others grow like its logarithm."""
    first = 0
    if both_sides:
        buckets //= 2
        first = buckets if distance > 0 else 0
    away = abs(distance) if both_sides else max(0, -distance)
    exact = buckets // 2
    if away < exact:
        return first + away
    share = math.log(away / exact) / math.log(furthest / exact)
    return first + min(buckets - 1, exact + math.floor(share * (buckets - exact)))


@pytest.mark.parametrize("both_sides", [True, False])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (16, 50)])
def test_relative_buckets(both_sides: bool, buckets: int, furthest: int) -> None:
    distances = np.arange(-400, 401)
    options = {"both_sides": both_sides, "buckets": buckets, "furthest": furthest}
    numbers = relative_bucket(jnp.asarray(distances), **options)
    wanted = [bucket_by_hand(int(d), **options) for d in distances]
    # Where the logarithm is whole, such as at a distance of 32, rounding may fall on either side.
    differ = np.flatnonzero(np.asarray(numbers) != wanted)
    assert len(differ) <= 4
    assert np.all(np.abs(np.asarray(numbers)[differ] - np.array(wanted)[differ]) == 1)
    assert numbers.min() == 0
    assert numbers.max() == buckets - 1


def test_relative_bias_is_the_number_of_the_bucket() -> None:
    layer = RelativeBias(heads=2, both_sides=True, buckets=8)
    queries, keys = jnp.array([[0, 3]]), jnp.array([[0, 1, 2, 200]])
    table = jax.random.normal(jax.random.key(0), (8, 2))
    bias = layer.apply({"params": {"table": table}}, queries, keys)
    for n, t, s in np.ndindex(2, 2, 4):
        bucket = bucket_by_hand(int(keys[0, s] - queries[0, t]), True, 8, 128)
        assert jnp.asarray(bias)[0, n, t, s] == table[bucket, n]
