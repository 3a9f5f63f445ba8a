"""Position encodings: sinusoids, rotary queries and keys, and biases added to the scores."""

import math
from functools import cache

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from transformer_jax.config import ModelConfig
from transformer_jax.types import Heads

FURTHEST = 128
"""The least distance of relative positions in the last bucket."""


def sinusoids(
    length: int, d_model: int, layout: str = "interleaved", wavelengths: str = "paper"
) -> np.ndarray:
    """Returns the table of positions [length, d_model], float32 (section 3.5).

    PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos(...). With the layout "halves", the
    sines are in the first half of the columns and the cosines in the second. With the wavelengths
    "marian", the exponent is i / (D/2 - 1), which ends at 1.
    """
    half = d_model // 2
    exponents = np.arange(half) / (half if wavelengths == "paper" else max(half - 1, 1))
    angle = np.arange(length)[:, None] * 10000.0**-exponents
    waves = np.stack([np.sin(angle), np.cos(angle)], axis=-1 if layout == "interleaved" else 1)
    return waves.reshape(length, d_model).astype(np.float32)


def position_table(config: ModelConfig) -> Float[np.ndarray, "T D"]:
    """Returns the sinusoids of a model for all positions, as the model and its exports use them."""
    layout, wavelengths = config.position_layout, config.position_wavelengths
    return sinusoids(config.max_length, config.d_model, layout, wavelengths)


@cache
def _rotations(length: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tables [T, H] of cosines and of signed sines by which `rotate` multiplies: the
    same arrays for all layers, so that each stack of a program holds them once."""
    sin, cos = np.split(sinusoids(length, width, layout="halves"), 2, axis=1)
    return np.repeat(cos, 2, axis=1), np.stack((-sin, sin), axis=-1).reshape(length, width)


def rotate(x: Heads, positions: Int[Array, "#B T"], length: int) -> Heads:
    """Rotates each pair of columns (2i, 2i+1) by the angle position · 10000^(-2i/H).

    The product of a query and a key then depends on their positions only through the distance
    between them. Positions are below `length`. (Su et al. 2021, RoFormer, section 3.2.2)
    """
    # As tables, since XLA's fusions would compute cosines again for each row and head.
    tables = _rotations(length, x.shape[-1])
    cos, sin = (jnp.asarray(table)[positions][:, None] for table in tables)
    swapped = x.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)
    return (x * cos + swapped * sin).astype(x.dtype)


def alibi_slopes(heads: int) -> np.ndarray:
    """Returns the slope of each head: 2^(-8/heads), its square, its cube and so on.

    If the number of heads is no power of 2, the slopes are those of the next lower power of 2,
    followed by every second slope of the next higher one. (Press et al. 2022, section 3)
    """
    lower = 2 ** math.floor(math.log2(heads))
    first = 2.0 ** (-8 / lower * np.arange(1, lower + 1))
    between = 2.0 ** (-4 / lower * np.arange(1, 2 * lower + 1, 2))
    return np.concatenate([first, between])[:heads].astype(np.float32)


def alibi(
    query_positions: Int[Array, "#B T"], key_positions: Int[Array, "#B S"], heads: int
) -> Float[Array, "#B N T S"]:
    """Returns the bias -slope · |distance|, which favors near keys (Press et al. 2022)."""
    distance = jnp.abs(key_positions[:, None, :] - query_positions[:, :, None])
    slopes = jnp.asarray(alibi_slopes(heads))[None, :, None, None]
    return -slopes * distance[:, None].astype(jnp.float32)


def relative_bucket(
    distance: Int[Array, "..."], *, both_sides: bool, buckets: int = 32, furthest: int = FURTHEST
) -> Int[Array, "..."]:
    """Returns the bucket of a key `distance` positions after the query.

    Small distances have a bucket each; the width of further buckets grows logarithmically, and
    distances of at least `furthest` share the last one. With `both_sides`, half of the buckets are
    for keys after the query; without, such keys count as distance 0. (Raffel et al. 2020, section
    2.1)
    """
    first = jnp.zeros_like(distance)
    if both_sides:
        buckets //= 2
        first = jnp.where(distance > 0, buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    exact = buckets // 2
    ratio = jnp.log(jnp.maximum(distance, 1) / exact) / math.log(furthest / exact)
    far = exact + (ratio * (buckets - exact)).astype(distance.dtype)
    return first + jnp.where(distance < exact, distance, jnp.minimum(far, buckets - 1))


class RelativeBias(nn.Module):
    """A learned bias on the scores for each head and bucket of distances.

    All layers of a stack share it. (Raffel et al. 2020, section 2.1)
    """

    heads: int
    both_sides: bool
    buckets: int = 32

    @nn.compact
    def __call__(
        self, query_positions: Int[Array, "#B T"], key_positions: Int[Array, "#B S"]
    ) -> Float[Array, "#B N T S"]:
        init = nn.initializers.normal(0.02)
        table = self.param("table", init, (self.buckets, self.heads))
        distance = key_positions[:, None, :] - query_positions[:, :, None]
        bucket = relative_bucket(distance, both_sides=self.both_sides, buckets=self.buckets)
        return jnp.moveaxis(jnp.asarray(table)[bucket], -1, 1)
