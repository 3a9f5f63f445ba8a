"""Attention masks: rules that kernels apply per block (`Mask`), and dense masks.

A dense mask is True where a query may attend to a key, and broadcasts to [B, N, T, S].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from transformer_jax.errors import UserError
from transformer_jax.special_ids import PAD
from transformer_jax.types import HostOrDeviceArray, Size

_STATIC = {"static": True}  # for JAX: not an array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """A rule by which each query attends to the keys of its own segment.

    `causal` hides the keys after the query, and `window` those that are further away than it.
    Segments number the sentences of a row from 1; 0 is padding, to which no query attends; None:
    each row is one sentence. Positions count from 0 in each sentence; None: they are the indices.
    `visible` hides further keys from single queries.
    `aligned` says that equal positions of a sentence have equal indices among queries and keys, so
    that a kernel can skip the blocks that `causal` and `window` hide. UserError: `window` is below
    0.
    """

    query_segments: HostOrDeviceArray | None = None  # [B or 1, T] int32
    query_positions: HostOrDeviceArray | None = None  # [B or 1, T] int32
    key_segments: HostOrDeviceArray | None = None  # [B or 1, S] int32
    key_positions: HostOrDeviceArray | None = None  # [B or 1, S] int32
    visible: HostOrDeviceArray | None = None  # [B or 1, T, S] bool; None: all
    causal: bool = field(default=False, metadata=_STATIC)
    window: int | None = field(default=None, metadata=_STATIC)
    aligned: bool = field(default=True, metadata=_STATIC)

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 0:
            raise UserError(f"window={self.window}: must be at least 0")

    def positions(self, queries: Size, keys: Size) -> tuple[Int[Array, "#B T"], Int[Array, "#B S"]]:
        """Returns the positions of `queries` queries and `keys` keys."""
        of_queries, of_keys = self.query_positions, self.key_positions
        of_queries = jnp.arange(queries)[None] if of_queries is None else of_queries
        return of_queries, jnp.arange(keys)[None] if of_keys is None else of_keys

    def mapped(self, of_queries: Callable[[Any], Any], of_keys: Callable[[Any], Any]) -> Mask:
        """Returns the mask with functions applied to its arrays of queries and to those of keys."""
        return replace(
            self,
            query_segments=jax.tree.map(of_queries, self.query_segments),
            query_positions=jax.tree.map(of_queries, self.query_positions),
            key_segments=jax.tree.map(of_keys, self.key_segments),
            key_positions=jax.tree.map(of_keys, self.key_positions),
        )

    def dense(self, queries: Size, keys: Size) -> Bool[Array, "#B 1 #T S"]:
        """Returns the mask as booleans, for `queries` queries and `keys` keys."""
        query_positions, key_positions = self.positions(queries, keys)
        offset = key_positions[:, None, :] - query_positions[:, :, None]
        visible = self._same_segment(keys)
        if self.causal:
            visible &= offset <= 0
        if self.window is not None:
            visible &= jnp.abs(offset) <= self.window
        if self.visible is not None:
            visible &= self.visible
        return visible[:, None]

    def sentences(self, queries: Size, keys: Size) -> tuple[Int[Array, "#B T"], Int[Array, "#B T"]]:
        """Returns the index of the first key of each query's sentence, and the sentence's length.

        Assumes that the sentences of a row stand in the order of their segments.
        """
        if self.key_segments is None:
            return jnp.zeros((1, queries), jnp.int32), jnp.full((1, queries), keys, jnp.int32)
        if self.query_segments is None:
            length = jnp.sum(self.key_segments > 0, axis=1, keepdims=True, dtype=jnp.int32)
            length = jnp.broadcast_to(length, (length.shape[0], queries))
            return jnp.zeros_like(length), length
        rows = jnp.broadcast_shapes(self.key_segments.shape[:1], self.query_segments.shape[:1])
        padding_last = jnp.iinfo(jnp.int32).max
        segments = jnp.where(self.key_segments > 0, self.key_segments, padding_last)
        segments, wanted = (
            jnp.broadcast_to(x, rows + x.shape[1:]) for x in (segments, self.query_segments)
        )
        first, end = (
            jax.vmap(partial(jnp.searchsorted, side=side))(segments, wanted)
            for side in ("left", "right")
        )
        return first, end - first

    def _same_segment(self, keys: Size) -> Bool[Array, "#B #T S"]:
        """Returns True for keys of the query's segment that are not padding."""
        if self.key_segments is None:
            return jnp.ones((1, 1, keys), bool)
        visible = jnp.asarray(self.key_segments > 0)[:, None, :]
        if self.query_segments is None:
            return visible
        return visible & (self.query_segments[:, :, None] == self.key_segments[:, None, :])


AnyMask = Mask | Bool[Array, "#B #N #T S"] | None
"""A rule, a dense mask, or None: every query attends to every key."""


def padding_mask(ids: Int[Array, "B S"]) -> Mask:
    """Returns the mask that hides padding among the keys."""
    return Mask(key_segments=(ids != PAD).astype(jnp.int32))


def dense_mask(mask: AnyMask, queries: Size, keys: Size) -> Bool[Array, "#B #N #T S"] | None:
    """Returns any mask as booleans, or None where every query attends to every key."""
    return mask.dense(queries, keys) if isinstance(mask, Mask) else mask
