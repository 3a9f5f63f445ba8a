"""Makes batches of ids, with a position that training can resume from.

The pairs of an epoch are shuffled by (seed, epoch) and cut into chunks of 65,536 pairs. Each chunk
is planned on its own, from its own lengths. The position in the data is one integer,
`chunk << 20 | batch in the chunk`, where chunks are counted over all epochs.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from typing import TypeVar, cast

import numpy as np
from jaxtyping import Int, Int32

from transformer_jax.config import DataConfig
from transformer_jax.data.buckets import ROWS_MULTIPLE, Plan, Shape, choose_shapes, group
from transformer_jax.data.dataset import Examples, Ragged
from transformer_jax.data.packing import pack, packed_shape
from transformer_jax.special_ids import BOS, PAD
from transformer_jax.types import Batch

CHUNK = 65_536
"""The number of pairs that are planned together."""
_BITS = 20
_EPOCH, _BATCHES = 1, 2  # what is shuffled: part of the key of a random order

Item = TypeVar("Item")


class Loader:
    """Endless training batches: a function of (examples, config, seed) and the position.

    sampling: as in `TokenizerConfig`; 0 disables it. devices: empty rows are added up to a multiple
    of it. process: (index, count); each process gets its slice of the rows of every batch.
    UserError: `config.batch_tokens` or `config.packed_length` cannot hold the longest pair.
    """

    def __init__(
        self,
        examples: Examples,
        config: DataConfig,
        seed: int,
        *,
        sampling: float = 0.0,
        decoder_start_id: int = BOS,
        devices: int = 1,
        process: tuple[int, int] = (0, 1),
    ) -> None:
        self.examples, self.seed, self.sampling = examples, seed, sampling
        self.packing, self.devices = config.packing, devices
        self.chunks = -(-len(examples) // CHUNK)  # in an epoch
        self._limits = examples.lengths.max(axis=0)
        self._make_batch = partial(
            make_batch,
            packed=config.packing,
            decoder_start_id=decoder_start_id,
            devices=devices,
            process=process,
        )
        first = self._read(0)
        lengths = examples.lengths
        if sampling:
            # The first chunk stands for all; the longest pair must fit with its own ids.
            lengths = np.concatenate([first.lengths, self._limits[None]])
        if config.packing:
            self.shapes = (packed_shape(lengths, config.batch_tokens, config.packed_length),)
        else:
            self.shapes = choose_shapes(lengths, config.batch_tokens, config.shapes)
        self._first = first, self._plan(first, 0)

    def batches(self, position: int = 0) -> Iterator[tuple[int, Batch]]:
        """Yields (position of the next batch, batch) from `position` on, without end."""
        chunk, start = position >> _BITS, position & ((1 << _BITS) - 1)
        # The next chunk is read, sampled and planned while the batches of this one are used.
        for examples, plans in prefetch(map(self._planned, itertools.count(chunk)), 1):
            for i, plan in enumerate(plans[start:], start + 1):
                after = chunk << _BITS | i if i < len(plans) else (chunk + 1) << _BITS
                yield after, self._make_batch(examples, plan)
            chunk, start = chunk + 1, 0

    def full_shapes(self) -> list[Shape]:
        """Returns the shapes of the batches, with the empty rows that `devices` adds."""
        return [shape.padded(self.devices) for shape in self.shapes]

    def epoch(self, position: int) -> int:
        """Returns the epoch that `position` is in, from 0."""
        return (position >> _BITS) // self.chunks

    @cached_property
    def non_padding_fraction(self) -> float:
        """The fraction of slots that hold tokens, over both sides, in the first chunk."""
        examples, plans = self._first
        slots = sum(plan.shape.rows * (plan.shape.source + plan.shape.target) for plan in plans)
        return float(examples.lengths.sum()) / slots

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches in an epoch, estimated from the first chunk.

        Exact where an epoch is one chunk and nothing is sampled.
        """
        examples, plans = self._first
        return -(-len(plans) * len(self.examples) // len(examples))

    def _planned(self, chunk: int) -> tuple[Examples, list[Plan]]:
        """Returns the pairs of a chunk and its batches, in the order in which they are used."""
        if chunk == 0:
            return self._first
        examples = self._read(chunk)
        return examples, self._plan(examples, chunk)

    def _read(self, chunk: int) -> Examples:
        """Returns the pairs of a chunk, in memory."""
        epoch, index = divmod(chunk, self.chunks)
        order = _epoch_order(len(self.examples), self.seed, epoch)
        pairs = order[index * CHUNK : (index + 1) * CHUNK]
        if self.sampling:
            return self.examples.sample(pairs, self.sampling, self.seed, epoch, self._limits)
        return self.examples.take(pairs)

    def _plan(self, examples: Examples, chunk: int) -> list[Plan]:
        """Returns the batches of a chunk, shuffled."""
        if self.packing:
            plans = pack(examples.lengths, self.shapes[0])
        else:
            plans = group(examples.lengths, self.shapes)
        return [plans[i] for i in _random_order(len(plans), self.seed, _BATCHES, chunk)]


def evaluation_batches(
    examples: Examples,
    config: DataConfig,
    *,
    decoder_start_id: int = BOS,
    devices: int = 1,
    process: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Yields every pair once, neither shuffled nor packed, in at most `config.shapes` shapes.

    The shapes are chosen for these examples. Batches exceed `config.batch_tokens` where the longest
    pairs would not fit otherwise.
    """
    lengths = examples.lengths
    batch_tokens = max(config.batch_tokens, ROWS_MULTIPLE * int(lengths.max()))
    for plan in group(lengths, choose_shapes(lengths, batch_tokens, config.shapes)):
        yield make_batch(
            examples,
            plan,
            packed=False,
            decoder_start_id=decoder_start_id,
            devices=devices,
            process=process,
        )


def prefetch(iterator: Iterator[Item], size: int = 2) -> Generator[Item, None, None]:
    """Yields the items of `iterator`, which a background thread makes up to `size` ahead.

    Exceptions of the iterator are raised here. The thread ends with the items, or when the
    generator is closed.
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


def make_batch(
    examples: Examples,
    plan: Plan,
    *,
    packed: bool,
    decoder_start_id: int,
    devices: int,
    process: tuple[int, int],
) -> Batch:
    """Returns the arrays of `plan`: this process's slice of its rows."""
    index, count = process
    height = plan.shape.padded(devices).rows // count
    local = plan.rows // height == index
    rows, starts = plan.rows[local] - index * height, plan.starts[local]
    source = examples.source.take(plan.pairs[local])
    target = examples.target.take(plan.pairs[local])
    target_in = np.roll(target.ids, 1)
    target_in[target.offsets[:-1]] = decoder_start_id
    to_source = partial(
        _scatter,
        slots=_token_slots(source, rows, starts[:, 0]),
        shape=(height, plan.shape.source),
    )
    to_target = partial(
        _scatter,
        slots=_token_slots(target, rows, starts[:, 1]),
        shape=(height, plan.shape.target),
    )
    batch = Batch(to_source(source.ids), to_target(target_in), to_target(target.ids))
    if not packed:
        return batch
    segments = plan.segments[local]
    return batch._replace(
        source_segments=to_source(np.repeat(segments, source.lengths())),
        source_positions=to_source(_positions(source)),
        target_segments=to_target(np.repeat(segments, target.lengths())),
        target_positions=to_target(_positions(target)),
    )


Slots = tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]
"""The row and the column of each token."""


def _token_slots(
    sentences: Ragged, rows: Int[np.ndarray, " Q"], starts: Int[np.ndarray, " Q"]
) -> Slots:
    """Returns the slots of all tokens of the sentences, which begin at (rows, starts)."""
    lengths = sentences.lengths()
    return np.repeat(rows, lengths), np.repeat(starts, lengths) + _positions(sentences)


def _scatter(
    values: Int[np.ndarray, " N"], slots: Slots, shape: tuple[int, int]
) -> Int32[np.ndarray, "B W"]:
    """Returns an array with the values in their slots and `PAD` in the others."""
    array = np.full(shape, PAD, np.int32)
    array[slots] = values
    return array


def _positions(sentences: Ragged) -> Int[np.ndarray, " N"]:
    """Returns the position of each token in its sentence, from 0."""
    return np.arange(len(sentences.ids)) - np.repeat(sentences.offsets[:-1], sentences.lengths())


@lru_cache(maxsize=1)
def _epoch_order(count: int, seed: int, epoch: int) -> Int[np.ndarray, " P"]:
    return _random_order(count, seed, _EPOCH, epoch)


def _random_order(count: int, *key: int) -> Int[np.ndarray, " P"]:
    """Returns a random permutation that is the same function of `key` in every NumPy version."""
    words = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(words, kind="stable")
