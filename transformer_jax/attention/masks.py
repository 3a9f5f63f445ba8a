"""Masks say which keys a query may see: as a rule, which kernels apply block by block, or dense.

A dense mask is True where a query may see a key, and broadcasts to [B, N, T, S].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from transformer_jax.types import HostOrDeviceArray, Size


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["query_segments", "query_positions", "key_segments", "key_positions"],
    meta_fields=["causal", "window", "aligned"],
)
@dataclass(frozen=True)
class Mask:
    """A query sees the keys of its segment, not after it if `causal`, not further than `window`.

    Segments number the sentences of a row from 1, and 0 is padding, which no query sees; None: all
    are of one sentence. Positions count from 0 in each sentence; None: along the row. `aligned`:
    equal positions of a sentence stand at equal indices of queries and keys, so that a kernel can
    skip what `causal` and `window` hide without looking at it. ValueError: a window below 0.
    """

    query_segments: HostOrDeviceArray | None = None  # [B or 1, T] int32
    query_positions: HostOrDeviceArray | None = None  # [B or 1, T] int32
    key_segments: HostOrDeviceArray | None = None  # [B or 1, S] int32
    key_positions: HostOrDeviceArray | None = None  # [B or 1, S] int32
    causal: bool = False
    window: int | None = None
    aligned: bool = True

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 0:
            raise ValueError(f"window={self.window}: must be at least 0")

    def windowed(self, window: int) -> Mask:
        """The same, and no further than `window` positions from the query."""
        return replace(self, window=window)

    def among_keys(self) -> Mask:
        """Which keys the keys would see as queries: those of their segment."""
        return Mask(key_segments=self.key_segments, query_segments=self.key_segments)

    def positions(self, queries: Size, keys: Size) -> tuple[Int[Array, "#B T"], Int[Array, "#B S"]]:
        """The positions of so many queries and keys."""
        row, column = self.query_positions, self.key_positions
        row = jnp.arange(queries)[None] if row is None else row
        return row, jnp.arange(keys)[None] if column is None else column

    def dense(self, queries: Size, keys: Size) -> Bool[Array, "#B 1 #T S"]:
        """The mask of so many queries and keys as booleans."""
        row, column = self.positions(queries, keys)
        ahead = column[:, None, :] - row[:, :, None]
        seen = self._same_segment(jnp.ones((1, 1, keys), bool))
        if self.causal:
            seen &= ahead <= 0
        if self.window is not None:
            seen &= jnp.abs(ahead) <= self.window
        return seen[:, None]

    def sentences(self, queries: Size, keys: Size) -> tuple[Int[Array, "#B T"], Int[Array, "#B T"]]:
        """The index at which the sentence begins that each query looks at, and its length.

        The sentences of a row stand one after the other, in the order of their segments.
        """
        if self.key_segments is None:
            return jnp.zeros((1, queries), jnp.int32), jnp.full((1, queries), keys, jnp.int32)
        if self.query_segments is None:
            length = jnp.sum(self.key_segments > 0, axis=1, keepdims=True, dtype=jnp.int32)
            length = jnp.broadcast_to(length, (length.shape[0], queries))
            return jnp.zeros_like(length), length
        rows = jnp.broadcast_shapes(self.key_segments.shape[:1], self.query_segments.shape[:1])
        last = jnp.iinfo(jnp.int32).max
        row = jnp.where(self.key_segments > 0, self.key_segments, last)
        row, segment = (jnp.broadcast_to(x, rows + x.shape[1:]) for x in (row, self.query_segments))
        first, end = (
            jax.vmap(partial(jnp.searchsorted, side=side))(row, segment)
            for side in ("left", "right")
        )
        return first, end - first

    def _same_segment(self, seen: Bool[Array, "1 #T S"]) -> Bool[Array, "#B #T S"]:
        if self.key_segments is not None:
            seen = seen & (self.key_segments > 0)[:, None, :]
            if self.query_segments is not None:
                seen &= self.query_segments[:, :, None] == self.key_segments[:, None, :]
        return seen


def padding_mask(ids: Int[Array, "B S"]) -> Mask:
    """Keys that are not padding (id 0)."""
    return Mask(key_segments=(ids != 0).astype(jnp.int32))


def dense_mask(
    mask: Mask | Bool[Array, "#B #N #T S"] | None, queries: Size, keys: Size
) -> Bool[Array, "#B #N #T S"] | None:
    """Any mask as booleans; None: every key is seen."""
    return mask.dense(queries, keys) if isinstance(mask, Mask) else mask
