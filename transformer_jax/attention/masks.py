"""Masks say which keys a query may see: True where it may, broadcastable to [B, N, T, S]."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def padding_mask(ids: Int[Array, "B S"]) -> Bool[Array, "B 1 1 S"]:
    """Keys that are not padding (id 0)."""
    return (ids != 0)[:, None, None, :]


def causal_mask(length: int) -> Bool[Array, "1 1 T T"]:
    """Keys at or before the query (section 3.2.3)."""
    position = jnp.arange(length)
    return (position[:, None] >= position[None, :])[None, None]


def segment_mask(
    query_segments: Int[Array, "B T"], key_segments: Int[Array, "B S"]
) -> Bool[Array, "B 1 T S"]:
    """Keys of the query's own segment, for rows that hold several sentences; 0 is padding."""
    same = query_segments[:, :, None] == key_segments[:, None, :]
    return (same & (key_segments > 0)[:, None, :])[:, None]
