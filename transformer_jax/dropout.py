"""Dropout with cheap masks, which do not depend on how arrays are sharded.

Drawing a random word for each element takes a third of a training step on a CPU. Here, a word is a
hash of its index and the key, and each of its four bytes decides on one element.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from transformer_jax.types import Key, Size


def realized_rate(rate: float) -> float:
    """Returns the nearest rate that bytes can realize: a multiple of 1/256, below 1."""
    return min(round(rate * 256), 255) / 256


def dropout(x: Float[Array, "..."], rate: float, key: Key | None) -> Float[Array, "..."]:
    """Sets elements to 0 with probability `rate` and divides the others by 1 - rate.

    `key` None: no dropout. The rate is rounded to a multiple of 1/256. (Srivastava et al. 2014)
    """
    rate = realized_rate(rate)
    if key is None or rate == 0:
        return x
    return jnp.where(keep_mask(key, x.shape, rate), x / (1 - rate), jnp.zeros((), x.dtype))


def keep_mask(key: Key, shape: tuple[Size, ...], rate: float) -> Bool[Array, "..."]:
    """Returns a mask that is True with probability 1 - `rate`, a multiple of 1/256."""
    *rows, width = shape
    words = _hash(jax.random.key_data(key), (*rows, -(-width // 4)))
    bytes_ = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*rows, -1)[..., :width]
    return bytes_ >= jnp.uint8(round(rate * 256))


def _hash(key: Array, shape: tuple[Size, ...]) -> Array:
    """Returns a 32-bit word for each index of `shape`."""
    index = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
        stride = stride * shape[axis] % 2**32
    # Keys that differ in one bit, such as key(0) and key(1), must give unrelated words too.
    first = _mix(key[0], key[1])
    second = _mix(key[1], first)
    return _mix(index ^ first, second)


def _mix(word: Array, key: Array) -> Array:
    """Mixes `word` by rounds of multiplications and shifts, and adds `key` between them.

    The multipliers are those of the finalizer "lowbias32" (C. Wellons, hash-prospector).
    """
    word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * jnp.uint32(0x846CA68B) + key
    word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
    return word ^ (word >> 15)
