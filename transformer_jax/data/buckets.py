"""Groups sentences of similar length into batches of a few fixed shapes, or packs them into rows.

For training the shapes are chosen for the lengths of the corpus; for translation, where lengths
are not known beforehand, they come from a fixed series.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from transformer_jax.errors import UserError

ROWS_MULTIPLE = 8
"""The number of rows of a training batch is a multiple of this, so that 2, 4 or 8 devices share
them evenly."""


class Lengths(NamedTuple):
    """The lengths of pairs, by the length of the longer side, from 0 to the longest."""

    counts: Int[np.ndarray, " L"]  # of pairs
    widest: Int[np.ndarray, "L 2"]  # longest source and longest target among them

    @classmethod
    def of(cls, lengths: Int[np.ndarray, "P 2"]) -> Lengths:
        """Returns the lengths of these pairs (source, target)."""
        longer = lengths.max(axis=1, initial=0)
        counts = np.bincount(longer, minlength=1)
        widest = np.zeros((len(counts), 2), int)
        np.maximum.at(widest, longer, lengths)
        return cls(counts, widest)

    def joined(self, other: Lengths) -> Lengths:
        """Returns the lengths of the pairs of both."""
        shorter, longer = sorted((self, other), key=lambda lengths: len(lengths.counts))
        counts, widest = longer.counts.copy(), longer.widest.copy()
        counts[: len(shorter.counts)] += shorter.counts
        widest[: len(shorter.counts)] = np.maximum(widest[: len(shorter.counts)], shorter.widest)
        return Lengths(counts, widest)

    def longest(self) -> Int[np.ndarray, " 2"]:
        """Returns the length of the longest source and of the longest target."""
        return self.widest.max(axis=0)


class Shape(NamedTuple):
    """The number of rows of a batch, and of the slots in a row on each side."""

    rows: int
    source: int
    target: int

    def padded(self, devices: int) -> Shape:
        """Returns the shape with rows added up to a multiple of `devices`."""
        return self._replace(rows=_round_up(self.rows, devices))


class Plan(NamedTuple):
    """One batch: the indices of its Q pairs, and where each of them goes."""

    shape: Shape
    pairs: Int[np.ndarray, " Q"]
    rows: Int[np.ndarray, " Q"]
    starts: Int[np.ndarray, "Q 2"]  # the first slot on each side
    segments: Int[np.ndarray, " Q"]  # the pair's number in its row, from 1


def choose_shapes(lengths: Lengths, batch_tokens: int, count: int) -> tuple[Shape, ...]:
    """Returns at most `count` shapes for pairs of these lengths, chosen for the least padding.

    Each shape is at least as wide as the one before it. Buckets are intervals of the longer side's
    length, and dynamic programming finds their best bounds (choosing both sides freely would fill
    0.5 % more of Multi30k's slots). A shape has as many rows as keep both sides within
    `batch_tokens`, rounded down to a multiple of `ROWS_MULTIPLE`.

    UserError: `batch_tokens` cannot hold the longest pair.
    """
    longest = len(lengths.counts) - 1
    _require_rows(batch_tokens, longest, f"sentences of {longest} tokens, the longest here")
    bounds = _best_bounds(lengths.counts, count)
    widths = np.maximum.accumulate(lengths.widest)[bounds]
    return tuple(
        Shape(batch_tokens // max(s, t) // ROWS_MULTIPLE * ROWS_MULTIPLE, s, t)
        for s, t in widths.tolist()
    )


def _best_bounds(histogram: Int[np.ndarray, " L"], count: int) -> list[int]:
    """Returns the upper bounds of at most `count` buckets; `histogram[n]` pairs have length n."""
    below = np.cumsum(histogram)
    longest = len(histogram) - 1
    cost = np.where(np.arange(longest + 1) > 0, np.inf, 0.0)  # slots of the pairs up to a length
    previous = []  # for each number of buckets and each bound, the bound before it
    for _ in range(count):
        costs = [cost[:n] + (below[n] - below[:n]) * n for n in range(1, longest + 1)]
        previous.append([0, *(int(np.argmin(row)) for row in costs)])
        cost = np.array([0.0, *(row.min() for row in costs)])
    bounds = [longest]
    for before in reversed(previous):
        bounds.append(before[bounds[-1]])
    return sorted({bound for bound in bounds if below[bound]})


def group(lengths: Int[np.ndarray, "P 2"], shapes: tuple[Shape, ...]) -> list[Plan]:
    """Returns batches with one pair a row, each pair in the smallest shape that holds it.

    Pairs that do not fill a batch move to the next larger shape, where they take fewer slots than
    empty rows would. At most one batch therefore has empty rows, and it is of the largest shape.
    """
    _, *widths = np.transpose(shapes)
    smallest = np.max([np.searchsorted(widths[side], lengths[:, side]) for side in (0, 1)], axis=0)
    plans = []
    waiting = np.zeros(0, int)
    for i, shape in enumerate(shapes):
        waiting = np.concatenate([waiting, np.flatnonzero(smallest == i)])
        spare = len(waiting) % shape.rows if i < len(shapes) - 1 else 0
        for start in range(0, len(waiting) - spare, shape.rows):
            pairs = waiting[start : start + shape.rows]
            count = len(pairs)
            starts, segments = np.zeros((count, 2), int), np.ones(count, int)
            plans.append(Plan(shape, pairs, np.arange(count), starts, segments))
        waiting = waiting[len(waiting) - spare :]
    return plans


def packed_shape(longest: int, batch_tokens: int, width: int) -> Shape:
    """Returns the one shape of packed batches, of at most `batch_tokens` slots on each side.

    longest: the number of tokens of the longest sentence. UserError: `width` cannot hold it, or
    `batch_tokens` the fewest rows.
    """
    if longest > width:
        raise UserError(
            f"data.packed_length={width}: must be at least {longest}, the longest sentence here"
        )
    _require_rows(batch_tokens, width, f"rows of data.packed_length={width}")
    return Shape(batch_tokens // width // ROWS_MULTIPLE * ROWS_MULTIPLE, width, width)


def _require_rows(batch_tokens: int, width: int, what: str) -> None:
    """UserError: `batch_tokens` cannot hold `ROWS_MULTIPLE` rows of this width."""
    if ROWS_MULTIPLE * width > batch_tokens:
        raise UserError(
            f"data.batch_tokens={batch_tokens}: must be at least {ROWS_MULTIPLE * width} to hold"
            f" {ROWS_MULTIPLE} {what}"
        )


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


def batches_by_length(
    lengths: Sequence[int], batch_tokens: int, max_length: int, devices: int = 1
) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Yields the shape (rows, width) of each batch and the indices of the sentences in it.

    Sentences are sorted by length, and those of length 0 are left out. Widths are 16, 32, 64, …, at
    most `max_length`. A full batch has a power of two of rows, with about `batch_tokens` slots.
    Sentences that do not fill one join those of the next width, and the last batch has a power of
    four of rows. Rows are then rounded up to a multiple of `devices`.
    """
    order = sorted((length, index) for index, length in enumerate(lengths) if length)
    widths = sorted({_width(length, max_length) for length, _ in order})
    left: list[int] = []
    for width in widths:
        left += [i for length, i in order if _width(length, max_length) == width]
        full = 1 << max((batch_tokens // width).bit_length() - 1, 0)
        while len(left) >= full or (left and width == widths[-1]):
            batch, left = left[:full], left[full:]
            rows = min(full, _power_of_four(len(batch)))
            yield (_round_up(rows, devices), width), batch


def _width(length: int, max_length: int) -> int:
    """Returns the smallest width of the series that holds `length` tokens."""
    return min(max(16, 1 << (length - 1).bit_length()), max_length)


def _power_of_four(count: int) -> int:
    """Returns the smallest of 1, 4, 16, 64, … that is at least `count`."""
    return 4 ** (((count - 1).bit_length() + 1) // 2)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
