"""Packs several pairs into a row, so that fewer slots are padding."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from transformer_jax.data.buckets import ROWS_MULTIPLE, Plan, Shape
from transformer_jax.errors import UserError


def packed_shape(longest: int, batch_tokens: int, width: int) -> Shape:
    """Returns the one shape of packed batches, of at most `batch_tokens` slots on each side.

    longest: the number of tokens of the longest sentence. UserError: `width` cannot hold it, or
    `batch_tokens` the fewest rows.
    """
    if longest > width:
        raise UserError(
            f"data.packed_length={width}: must be at least {longest}, the longest sentence here"
        )
    if ROWS_MULTIPLE * width > batch_tokens:
        raise UserError(
            f"data.batch_tokens={batch_tokens}: must be at least {ROWS_MULTIPLE * width} to hold"
            f" {ROWS_MULTIPLE} rows of data.packed_length={width}"
        )
    return Shape(batch_tokens // width // ROWS_MULTIPLE * ROWS_MULTIPLE, width, width)


def pack(lengths: Int[np.ndarray, "P 2"], shape: Shape) -> list[Plan]:
    """Returns packed batches by best-fit decreasing: the longest pairs first, each in the row where
    it leaves the fewest free slots."""
    # Free slots of every row. They are unsigned: where a pair does not fit, the difference wraps
    # around to billions of slots.
    free_source = np.full(len(lengths) + 1, shape.source, np.uint32)
    free_target = np.full(len(lengths) + 1, shape.target, np.uint32)
    rows, segments = np.zeros(len(lengths), int), np.zeros(len(lengths), int)
    starts = np.zeros((len(lengths), 2), int)
    pairs_in_row = np.zeros(len(lengths) + 1, int)
    used = 0  # rows
    order = np.argsort(-lengths.sum(axis=1), kind="stable")
    for pair, (source, target) in zip(order.tolist(), lengths[order].tolist(), strict=True):
        candidates = slice(used + 1)  # and an empty row, which always fits
        left = np.maximum(free_source[candidates] - source, free_target[candidates] - target)
        row = int(np.argmin(left))
        used = max(used, row + 1)
        pairs_in_row[row] += 1
        rows[pair], segments[pair] = row, pairs_in_row[row]
        starts[pair] = shape.source - free_source[row], shape.target - free_target[row]
        free_source[row] -= source
        free_target[row] -= target
    # The first rows have the longest pairs. Sorting rows by their first pair makes them random.
    first = np.unique(rows, return_index=True)[1]
    rows = np.argsort(np.argsort(first))[rows]
    batches = [np.flatnonzero(rows // shape.rows == i) for i in range(-(-used // shape.rows))]
    return [
        Plan(shape, pairs, rows[pairs] % shape.rows, starts[pairs], segments[pairs])
        for pairs in batches
    ]
