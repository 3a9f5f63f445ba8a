"""The largest of many values, faster than `jax.lax.top_k` and `jnp.argmax` are on a CPU."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def top_k(x: Float[Array, "B N"], count: int) -> tuple[Float[Array, "B C"], Int[Array, "B C"]]:
    """Returns the `count` largest values of each row and their indices, as `jax.lax.top_k` does.

    It takes the `count` chunks of the largest maxima, and then the largest values in them. These
    are the same: a value in any other chunk is at most the least of these maxima. Of equal values
    those of the lowest index are chosen. If such a value were in another chunk, all chosen chunks
    whose maximum equals it would come before that chunk, and hold enough of them.
    """
    rows, size = x.shape
    width = _chunk(size, count)
    chunks = x.reshape(rows, size // width, width)
    if chunks.shape[1] <= count:
        values, indices = jax.lax.top_k(x, count)
        return values, indices
    _, chosen = jax.lax.top_k(jnp.max(chunks, axis=2), count)
    chosen = jnp.sort(chosen, axis=1)  # so that of equal values the first comes first
    near = jnp.take_along_axis(chunks, chosen[:, :, None], axis=1).reshape(rows, -1)
    values, places = jax.lax.top_k(near, count)
    first = jnp.take_along_axis(chosen, places // width, axis=1) * width
    return values, first + places % width


def _chunk(size: int, count: int) -> int:
    """Returns the divisor of `size` for which the two steps look at the fewest values."""
    divisors = {d for i in range(1, math.isqrt(size) + 1) if size % i == 0 for d in (i, size // i)}
    return min(divisors, key=lambda width: size // width + count * width)


def first_argmax(x: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """Returns the index of the largest value of each row, the first one of equal values."""
    _, indices = top_k(x.reshape(-1, x.shape[-1]), 1)
    return indices.reshape(x.shape[:-1])
