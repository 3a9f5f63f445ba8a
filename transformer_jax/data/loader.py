"""Makes batches of ids, with a position that training can resume from.

The pairs of an epoch are shuffled (see order.py) and cut into chunks of 65,536 pairs. Each chunk is
planned on its own, from its own lengths. The position in the data is one integer,
`chunk << 20 | batch in the chunk`, where chunks are counted over all epochs.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar, cast

import numpy as np
from jaxtyping import Int, Int32

from transformer_jax.config import DataConfig
from transformer_jax.data.buckets import ROWS_MULTIPLE, Plan, Shape, choose_shapes, group
from transformer_jax.data.dataset import Examples
from transformer_jax.data.lengths import Lengths
from transformer_jax.data.order import LATEST, batch_order, make_order
from transformer_jax.data.packing import pack, packed_shape
from transformer_jax.data.ragged import Ragged
from transformer_jax.special_ids import BOS, PAD
from transformer_jax.types import Batch

CHUNK = 65_536
"""The number of pairs that are planned together."""
_BITS = 20

Item = TypeVar("Item")


class Loaded(NamedTuple):
    """A batch, or this process's part of it."""

    after: int  # position of the next batch
    batch: Batch
    drawn: tuple[int, ...]  # pairs of the whole batch from each corpus


class _Read(NamedTuple):
    """What a process has read of a chunk: with sampling, its share of the pairs."""

    chunk: int
    examples: Examples
    pairs: Int[np.ndarray, " Q"]  # indices in `examples`
    corpora: Int[np.ndarray, " P"]  # of all pairs of the chunk


class _Planned(NamedTuple):
    """A chunk that is ready for its batches to be made."""

    examples: Examples  # this process's pairs
    plans: list[Plan]  # this process's part of the batches
    drawn: list[tuple[int, ...]]  # as in `Loaded`


class Loader:
    """Endless training batches: a function of (examples, config, seed) and the position.

    sampling: as in `TokenizerConfig`; 0 disables it. order: version of the order of the pairs.
    devices: empty rows are added up to a multiple of it. parts: (own, count); the rows of a batch
    are split into `count` parts, of which this process makes those with the indices `own`, in
    ascending order. share: (index, count); each process samples its slice of the pairs of a chunk.
    gather: returns the arrays of all these processes, one after the other; is called in the thread
    that takes batches.
    UserError: `config.batch_tokens` or `config.packed_length` cannot hold the longest pair.
    """

    def __init__(
        self,
        examples: Examples,
        config: DataConfig,
        seed: int,
        *,
        sampling: float = 0.0,
        order: int = LATEST,
        decoder_start_id: int = BOS,
        devices: int = 1,
        parts: tuple[Sequence[int], int] = ((0,), 1),
        share: tuple[int, int] = (0, 1),
        gather: Callable[[np.ndarray], np.ndarray] = lambda array: array,
    ) -> None:
        self.examples, self.seed, self.sampling = examples, seed, sampling
        self.packing, self.devices, self._parts = config.packing, devices, parts
        self._share, self._gather = share, gather
        self._order = make_order(examples.sizes or [len(examples)], config, seed, order)
        self._ends = np.cumsum(examples.sizes)  # of the corpora
        self.chunks = -(-self._order.epoch // CHUNK)  # in an epoch
        self._limits = examples.lengths.longest()
        self._make_batch = partial(
            make_batch, packed=config.packing, decoder_start_id=decoder_start_id
        )
        first = self._exchanged(self._read(0))
        first_lengths = first.examples.lengths_of(first.pairs)
        lengths = examples.lengths
        if sampling:
            # The first chunk stands for all; the longest pair must fit with its own ids.
            lengths = Lengths.of(np.concatenate([first_lengths, self._limits[None]]))
        if config.packing:
            longest = int(self._limits.max())
            self.shapes = (packed_shape(longest, config.batch_tokens, config.packed_length),)
        else:
            self.shapes = choose_shapes(lengths, config.batch_tokens, config.shapes)
        plans = self._plan(first_lengths, 0)
        slots = sum(plan.shape.rows * (plan.shape.source + plan.shape.target) for plan in plans)
        self.non_padding_fraction = float(first_lengths.sum()) / slots
        """The fraction of slots that hold tokens, over both sides, in the first chunk."""
        self.batches_per_epoch = -(-len(plans) * self._order.epoch // len(first_lengths))
        """The number of batches in an epoch, estimated from the first chunk. Exact where an epoch
        is one chunk and nothing is sampled."""
        self._first = self._own(first, plans)

    def batches(self, position: int = 0) -> Generator[Loaded, None, None]:
        """Yields the batches from `position` on, without end.

        Background threads read and sample the next chunk while the batches of this one are used,
        and make two batches ahead. They end when the generator is closed.
        """
        chunk, start = position >> _BITS, position & ((1 << _BITS) - 1)
        for examples, plans, drawn in self._chunks(chunk):
            batches = prefetch(map(partial(self._make_batch, examples), plans[start:]))
            for i, batch in enumerate(batches, start + 1):
                after = chunk << _BITS | i if i < len(plans) else (chunk + 1) << _BITS
                yield Loaded(after, batch, drawn[i - 1])
            chunk, start = chunk + 1, 0

    def full_shapes(self) -> list[Shape]:
        """Returns the shapes of the batches, with the empty rows that `devices` adds."""
        return [shape.padded(self.devices) for shape in self.shapes]

    def epoch(self, position: int) -> int:
        """Returns the epoch that `position` is in, from 0."""
        return (position >> _BITS) // self.chunks

    def describe(self, position: int) -> str:
        """Returns the name of the batch at `position`, all numbers from 0."""
        epoch, chunk = divmod(position >> _BITS, self.chunks)
        return f"epoch {epoch}, chunk {chunk}, batch {position & ((1 << _BITS) - 1)}"

    def _chunks(self, chunk: int) -> Iterator[_Planned]:
        """Yields this process's pairs and batches of each chunk from `chunk` on."""
        # The loader keeps the first chunk.
        read = (self._read(number) if number else None for number in itertools.count(chunk))
        if self.sampling and self._share[1] > 1:
            return map(self._planned, prefetch(read, 1))  # `gather` is called in this thread
        return prefetch(map(self._planned, read), 1)

    def _read(self, chunk: int) -> _Read:
        """Returns what this process reads of a chunk."""
        epoch, index = divmod(chunk, self.chunks)
        bounds = (min(i * CHUNK, self._order.epoch) for i in (index, index + 1))
        drawn = self._order.draw(chunk, *(epoch * self._order.epoch + bound for bound in bounds))
        corpora = np.searchsorted(self._ends, drawn.pairs, side="right")
        if not self.sampling:
            return _Read(chunk, self.examples, drawn.pairs, corpora)
        pairs, passes = (np.array_split(each, self._share[1])[self._share[0]] for each in drawn)
        sampled = self.examples.sample(pairs, self.sampling, self.seed, passes, self._limits)
        return _Read(chunk, sampled, np.arange(len(pairs)), corpora)

    def _exchanged(self, read: _Read) -> _Read:
        """Returns the whole chunk.

        The sampled ids are gathered, since that takes much less time than to sample again those of
        this process's rows, which are known only after the plan.
        """
        if not self.sampling:
            return read
        source, target = (
            Ragged.of_lengths(self._gather(side.ids), self._gather(side.lengths()))
            for side in (read.examples.source, read.examples.target)
        )
        examples = read.examples.with_ids(source, target)
        return read._replace(examples=examples, pairs=np.arange(len(examples)))

    def _planned(self, read: _Read | None) -> _Planned:
        """Returns this process's pairs and batches of a chunk; None: the first one."""
        if read is None:
            return self._first
        whole = self._exchanged(read)
        return self._own(whole, self._plan(whole.examples.lengths_of(whole.pairs), whole.chunk))

    def _plan(self, lengths: Int[np.ndarray, "P 2"], chunk: int) -> list[Plan]:
        """Returns the batches of a chunk in the order of their use, which is random."""
        plans = pack(lengths, self.shapes[0]) if self.packing else group(lengths, self.shapes)
        return [plans[i] for i in batch_order(len(plans), self.seed, chunk)]

    def _own(self, whole: _Read, plans: list[Plan]) -> _Planned:
        """Returns the pairs in this process's rows, in memory, and its part of the batches."""
        count = max(len(self._ends), 1)
        drawn = [np.bincount(whole.corpora[plan.pairs], minlength=count) for plan in plans]
        plans = [take_rows(plan, self.devices, self._parts) for plan in plans]
        pairs = np.concatenate([plan.pairs for plan in plans])
        ends = np.cumsum([len(plan.pairs) for plan in plans]).tolist()
        plans = [
            plan._replace(pairs=np.arange(end - len(plan.pairs), end))
            for plan, end in zip(plans, ends, strict=True)
        ]
        examples = whole.examples.take(whole.pairs[pairs])
        return _Planned(examples, plans, [tuple(each.tolist()) for each in drawn])


def evaluation_batches(
    examples: Examples,
    config: DataConfig,
    *,
    decoder_start_id: int = BOS,
    devices: int = 1,
    parts: tuple[Sequence[int], int] = ((0,), 1),
) -> Iterator[Batch]:
    """Yields every pair once, neither shuffled nor packed, in at most `config.shapes` shapes.

    The shapes are chosen for these examples. Batches exceed `config.batch_tokens` where the longest
    pairs would not fit otherwise.
    """
    batch_tokens = max(config.batch_tokens, ROWS_MULTIPLE * int(examples.lengths.longest().max()))
    shapes = choose_shapes(examples.lengths, batch_tokens, config.shapes)
    for plan in group(examples.lengths_of(np.arange(len(examples))), shapes):
        own = take_rows(plan, devices, parts)
        yield make_batch(examples, own, packed=False, decoder_start_id=decoder_start_id)


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


def take_rows(plan: Plan, devices: int, parts: tuple[Sequence[int], int]) -> Plan:
    """Returns the part of a batch that this process makes: some of its rows.

    devices: empty rows are added up to a multiple of it. parts: as in `Loader`.
    """
    own, count = parts
    height = plan.shape.padded(devices).rows // count
    part, row = np.divmod(plan.rows, height)
    kept = np.isin(part, own)
    return Plan(
        plan.shape._replace(rows=height * len(own)),
        plan.pairs[kept],
        np.searchsorted(own, part[kept]) * height + row[kept],
        plan.starts[kept],
        plan.segments[kept],
    )


def make_batch(examples: Examples, plan: Plan, *, packed: bool, decoder_start_id: int) -> Batch:
    """Returns the arrays of `plan`."""
    shape, rows, starts = plan.shape, plan.rows, plan.starts
    source = examples.source.take(plan.pairs)
    target = examples.target.take(plan.pairs)
    target_in = np.roll(target.ids, 1)
    target_in[target.offsets[:-1]] = decoder_start_id
    to_source = partial(
        _scatter,
        slots=_token_slots(source, rows, starts[:, 0]),
        shape=(shape.rows, shape.source),
    )
    to_target = partial(
        _scatter,
        slots=_token_slots(target, rows, starts[:, 1]),
        shape=(shape.rows, shape.target),
    )
    batch = Batch(to_source(source.ids), to_target(target_in), to_target(target.ids))
    if not packed:
        return batch
    segments = plan.segments
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
