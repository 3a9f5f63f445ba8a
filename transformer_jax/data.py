"""Pairs of ids to batches of a few fixed shapes. NumPy only; knows nothing of devices but a number.

An epoch's pairs are shuffled by (seed, epoch) and cut into windows of 65,536 pairs; each window is
planned on its own, from its own lengths. The position in the data is one integer,
`window << 20 | batch in the window`, with windows counted over all epochs.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeVar, cast

import numpy as np
from jaxtyping import Int, Int32

from transformer_jax.config import DataConfig
from transformer_jax.corpus import Examples
from transformer_jax.types import Batch

WINDOW = 65_536
"""Pairs that are planned together."""
ROWS_MULTIPLE = 8
"""Batches have a multiple of so many rows, so that 2, 4 or 8 devices share them evenly."""
_BITS = 20
_EPOCH, _BATCHES = 1, 2  # what a random order is for

Item = TypeVar("Item")


class Shape(NamedTuple):
    """Rows of a batch, and the slots of a row on each side."""

    rows: int
    source: int
    target: int


class Plan(NamedTuple):
    """One batch: where each of its Q pairs goes."""

    shape: Shape
    pairs: Int[np.ndarray, " Q"]
    rows: Int[np.ndarray, " Q"]
    starts: Int[np.ndarray, "Q 2"]  # first slot on each side
    segments: Int[np.ndarray, " Q"]  # number in its row, from 1


def choose_shapes(
    lengths: Int[np.ndarray, "P 2"], batch_tokens: int, count: int
) -> tuple[Shape, ...]:
    """At most `count` shapes that hold pairs of `lengths` with little padding; each holds the last.

    Pairs are divided by their longer side, at the bounds that dynamic programming finds best (free
    rectangles fill 0.5 % more of Multi30k's slots). A shape has the largest multiple of
    `ROWS_MULTIPLE` rows that keeps both sides within `batch_tokens`. ValueError: the longest pair
    does not fit.
    """
    longer = lengths.max(axis=1)
    longest = int(longer.max())
    if ROWS_MULTIPLE * longest > batch_tokens:
        raise ValueError(
            f"data.batch_tokens={batch_tokens}: must be at least {ROWS_MULTIPLE * longest} to hold"
            f" {ROWS_MULTIPLE} sentences of {longest} tokens, the longest here"
        )
    bounds = _bounds(np.bincount(longer), count)
    widths = np.stack([lengths[longer <= bound].max(axis=0) for bound in bounds])
    return tuple(
        Shape(batch_tokens // max(s, t) // ROWS_MULTIPLE * ROWS_MULTIPLE, s, t)
        for s, t in widths.tolist()
    )


def _bounds(histogram: Int[np.ndarray, " L"], count: int) -> list[int]:
    """The upper bounds of at most `count` buckets; `histogram[n]` pairs have length n."""
    below = np.cumsum(histogram)
    longest = len(histogram) - 1
    cost = np.where(np.arange(longest + 1) > 0, np.inf, 0.0)  # slots of the pairs up to a length
    previous = []  # for each number of buckets and bound, the bound before it
    for _ in range(count):
        ways = [cost[:n] + (below[n] - below[:n]) * n for n in range(1, longest + 1)]
        previous.append([0, *(int(np.argmin(way)) for way in ways)])
        cost = np.array([0.0, *(way.min() for way in ways)])
    bounds = [longest]
    for before in reversed(previous):
        bounds.append(before[bounds[-1]])
    return sorted({bound for bound in bounds if below[bound]})


class Loader:
    """Endless batches of `examples`: a function of (examples, config, seed) and the position.

    sampling: as in `TokenizerConfig`; 0: none. devices: rows are filled up with empty ones to a
    multiple of it. process: (index, count); each gets its slice of every batch's rows.
    ValueError: `config.batch_tokens` or `config.packed_length` cannot hold the longest pair.
    """

    def __init__(
        self,
        examples: Examples,
        config: DataConfig,
        seed: int,
        *,
        sampling: float = 0.0,
        decoder_start_id: int = 1,
        devices: int = 1,
        process: tuple[int, int] = (0, 1),
    ) -> None:
        self.examples, self.seed, self.sampling = examples, seed, sampling
        self.packing = config.packing
        self.windows = -(-len(examples) // WINDOW)  # in an epoch
        self._limits = examples.lengths.max(axis=0)
        self._layout = decoder_start_id, devices, process
        self._first = self._read(0)
        lengths = examples.lengths
        if sampling:
            # The first window stands for all; the longest pair must fit with its own ids.
            lengths = np.concatenate([self._first.lengths, self._limits[None]])
        if config.packing:
            self.shapes = _packed_shape(lengths, config.batch_tokens, config.packed_length)
        else:
            self.shapes = choose_shapes(lengths, config.batch_tokens, config.shapes)

    def batches(self, position: int = 0) -> Iterator[tuple[int, Batch]]:
        """(position of the next batch, batch), from `position` on without end."""
        counter, start = position >> _BITS, position & ((1 << _BITS) - 1)
        # The next window is read, sampled and planned while the batches of this one are used.
        for window, plans in prefetch(map(self._planned, itertools.count(counter)), 1):
            for i, plan in enumerate(plans[start:], start + 1):
                after = counter << _BITS | i if i < len(plans) else (counter + 1) << _BITS
                yield after, _batch(window, plan, self.packing, *self._layout)
            counter, start = counter + 1, 0

    def full_shapes(self) -> list[Shape]:
        """The shapes with the empty rows that fill them up for the devices."""
        return [_filled_up(shape, self._layout[1]) for shape in self.shapes]

    def epoch(self, position: int) -> int:
        """The epoch that `position` is in, from 0."""
        return (position >> _BITS) // self.windows

    @cached_property
    def fill(self) -> float:
        """Tokens over slots, both sides together, in the first window (partial batches too)."""
        window, plans = self._planned(0)
        slots = sum(plan.shape.rows * (plan.shape.source + plan.shape.target) for plan in plans)
        return float(window.lengths.sum()) / slots

    @cached_property
    def batches_per_epoch(self) -> int:
        """Exact for one window without sampling; else reckoned from the first window."""
        window, plans = self._planned(0)
        return -(-len(plans) * len(self.examples) // len(window))

    def _read(self, counter: int) -> Examples:
        """The pairs of a window, in memory."""
        epoch, window = divmod(counter, self.windows)
        pairs = _epoch_order(len(self.examples), self.seed, epoch)[
            window * WINDOW : (window + 1) * WINDOW
        ]
        if self.sampling:
            return self.examples.sample(pairs, self.sampling, self.seed, epoch, self._limits)
        return self.examples.take(pairs)

    def _planned(self, counter: int) -> tuple[Examples, list[Plan]]:
        window = self._read(counter) if counter else self._first
        plan = _pack if self.packing else _group
        plans = plan(window.lengths, self.shapes)
        order = _order(len(plans), self.seed, _BATCHES, counter)
        return window, [plans[i] for i in order]


def in_order(
    examples: Examples,
    config: DataConfig,
    *,
    decoder_start_id: int = 1,
    devices: int = 1,
    process: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Every pair once, not packed, in at most `config.shapes` shapes chosen for these examples.

    Batches exceed `config.batch_tokens` where the longest pairs would not fit otherwise.
    """
    lengths = examples.lengths
    batch_tokens = max(config.batch_tokens, ROWS_MULTIPLE * int(lengths.max()))
    shapes = choose_shapes(lengths, batch_tokens, config.shapes)
    for plan in _group(lengths, shapes):
        yield _batch(examples, plan, False, decoder_start_id, devices, process)


def prefetch(iterator: Iterator[Item], size: int = 2) -> Generator[Item, None, None]:
    """The items of `iterator`, up to `size` of them prepared ahead by a background thread.

    What it raises is raised here. The thread ends with the items, or when the generator is closed.
    """
    end = object()
    pool = ThreadPoolExecutor(1, "prefetch")
    try:
        ahead = deque(pool.submit(next, iterator, end) for _ in range(size))
        while (item := ahead.popleft().result()) is not end:
            ahead.append(pool.submit(next, iterator, end))
            yield cast(Item, item)
    finally:
        pool.shutdown(cancel_futures=True)


def _packed_shape(
    lengths: Int[np.ndarray, "P 2"], batch_tokens: int, width: int
) -> tuple[Shape, ...]:
    longest = int(lengths.max())
    if longest > width:
        raise ValueError(
            f"data.packed_length={width}: must be at least {longest}, the longest sentence here"
        )
    if ROWS_MULTIPLE * width > batch_tokens:
        raise ValueError(
            f"data.batch_tokens={batch_tokens}: must be at least {ROWS_MULTIPLE * width} to hold"
            f" {ROWS_MULTIPLE} rows of data.packed_length={width}"
        )
    return (Shape(batch_tokens // width // ROWS_MULTIPLE * ROWS_MULTIPLE, width, width),)


def _group(lengths: Int[np.ndarray, "P 2"], shapes: tuple[Shape, ...]) -> list[Plan]:
    """Each pair into the smallest shape that holds it, one pair a row.

    Pairs that do not fill a batch go on to the next shape, where they cost less than empty rows
    would; so one batch at most has empty rows, and it is of the largest shape.
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
            rows, starts, segments = (
                np.arange(len(pairs)),
                (len(pairs), 2),
                np.ones(len(pairs), int),
            )
            plans.append(Plan(shape, pairs, rows, np.zeros(starts, int), segments))
        waiting = waiting[len(waiting) - spare :]
    return plans


def _pack(lengths: Int[np.ndarray, "P 2"], shapes: tuple[Shape, ...]) -> list[Plan]:
    """Several pairs into a row: the longest first, each where it leaves the fewest free slots."""
    (shape,) = shapes
    # Free slots of all rows, unsigned: where a pair does not fit, it leaves billions of them.
    free_source = np.full(len(lengths) + 1, shape.source, np.uint32)
    free_target = np.full(len(lengths) + 1, shape.target, np.uint32)
    rows, segments = np.zeros(len(lengths), int), np.zeros(len(lengths), int)
    starts = np.zeros((len(lengths), 2), int)
    held = np.zeros(len(lengths) + 1, int)
    begun = 0
    order = np.argsort(-lengths.sum(axis=1), kind="stable")
    for pair, (source, target) in zip(order.tolist(), lengths[order].tolist(), strict=True):
        some = slice(begun + 1)  # one row more than those begun: it always fits
        row = int(np.argmin(np.maximum(free_source[some] - source, free_target[some] - target)))
        begun = max(begun, row + 1)
        held[row] += 1
        rows[pair], segments[pair] = row, held[row]
        starts[pair] = shape.source - free_source[row], shape.target - free_target[row]
        free_source[row] -= source
        free_target[row] -= target
    # Rows in the order of their first pairs, which is random: as begun, the long ones come first.
    first = np.unique(rows, return_index=True)[1]
    rows = np.argsort(np.argsort(first))[rows]
    batches = [np.flatnonzero(rows // shape.rows == i) for i in range(-(-begun // shape.rows))]
    return [
        Plan(shape, pairs, rows[pairs] % shape.rows, starts[pairs], segments[pairs])
        for pairs in batches
    ]


def _filled_up(shape: Shape, devices: int) -> Shape:
    """The shape with the empty rows that make it a multiple of `devices`."""
    return shape._replace(rows=-(-shape.rows // devices) * devices)


def _batch(
    examples: Examples,
    plan: Plan,
    packed: bool,
    decoder_start_id: int,
    devices: int,
    process: tuple[int, int],
) -> Batch:
    """The arrays of `plan`: this process's slice of its rows."""
    index, count = process
    height = _filled_up(plan.shape, devices).rows // count
    mine = plan.rows // height == index
    rows, starts = plan.rows[mine] - index * height, plan.starts[mine]
    source = examples.source.take(plan.pairs[mine])
    target = examples.target.take(plan.pairs[mine])
    entering = np.roll(target.ids, 1)
    entering[target.offsets[:-1]] = decoder_start_id
    on_source = _layer(source.lengths(), rows, starts[:, 0], (height, plan.shape.source))
    on_target = _layer(target.lengths(), rows, starts[:, 1], (height, plan.shape.target))
    batch = Batch(on_source(source.ids), on_target(entering), on_target(target.ids))
    if not packed:
        return batch
    segments = plan.segments[mine]
    return batch._replace(
        source_segments=on_source(np.repeat(segments, source.lengths())),
        source_positions=on_source(_count_up(source.lengths())),
        target_segments=on_target(np.repeat(segments, target.lengths())),
        target_positions=on_target(_count_up(target.lengths())),
    )


def _layer(
    lengths: Int[np.ndarray, " Q"],
    rows: Int[np.ndarray, " Q"],
    starts: Int[np.ndarray, " Q"],
    shape: tuple[int, int],
) -> Callable[[Int[np.ndarray, " N"]], Int32[np.ndarray, "B W"]]:
    """A function that lays the values of all pairs' tokens out in an array of `shape`."""
    places = np.repeat(rows, lengths), np.repeat(starts, lengths) + _count_up(lengths)

    def lay(values: Int[np.ndarray, " N"]) -> Int32[np.ndarray, "B W"]:
        array = np.zeros(shape, np.int32)
        array[places] = values
        return array

    return lay


def _count_up(lengths: Int[np.ndarray, " Q"]) -> Int[np.ndarray, " N"]:
    """0, 1, … for each length, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)


@lru_cache(maxsize=1)
def _epoch_order(count: int, seed: int, epoch: int) -> Int[np.ndarray, " P"]:
    return _order(count, seed, _EPOCH, epoch)


def _order(count: int, *key: int) -> Int[np.ndarray, " P"]:
    """A random order that is a function of `key` in every version of NumPy."""
    words = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(words, kind="stable")
