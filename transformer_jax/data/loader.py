"""Makes batches of ids, with a position that training can resume from.

The pairs of an epoch are shuffled (see order.py) and cut into chunks of 65,536 pairs. Each chunk is
planned on its own, from its own lengths. The position in the data is one integer,
`chunk << 20 | batch in the chunk`, where chunks are counted over all epochs.
"""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar, cast

import numpy as np
from jaxtyping import Int, Int32

from transformer_jax.config import Config
from transformer_jax.data import buckets
from transformer_jax.data.buckets import Lengths, Plan, Shape
from transformer_jax.data.dataset import Examples
from transformer_jax.data.order import BATCHES, Drawn, make_order, random_order
from transformer_jax.data.ragged import Ragged
from transformer_jax.special_ids import PAD
from transformer_jax.types import Batch

CHUNK = 65_536
"""The number of pairs that are planned together."""
_BITS = 20

Item = TypeVar("Item")


class Shard(NamedTuple):
    """The part of each batch that this process makes; by default all of it."""

    devices: int = 1
    """Empty rows are added up to a multiple of it."""
    parts: tuple[Sequence[int], int] = ((0,), 1)
    """The indices of the parts of a batch's rows that are made here, ascending, and the number of
    all parts."""
    process: tuple[int, int] = (0, 1)
    """Index and number of processes. Each one samples its slice of the pairs of a chunk."""
    gather: Callable[[np.ndarray], np.ndarray] = lambda array: array
    """Returns the arrays of all processes, one after the other. It is called in the thread that
    takes batches."""


WHOLE = Shard()


class Loaded(NamedTuple):
    """A batch, or this process's part of it."""

    batch: Batch
    after: int  # position of the next batch
    epoch: int  # of the next batch
    name: str  # its place in the data, all numbers from 0
    drawn: tuple[int, ...]  # pairs of the whole batch from each corpus


class _Read(NamedTuple):
    """What a process has read of a chunk: with sampling, its slice of the pairs."""

    examples: Examples
    pairs: Int[np.ndarray, " Q"]  # indices in `examples`
    corpora: Int[np.ndarray, " P"]  # of all pairs of the chunk

    @property
    def lengths(self) -> Int32[np.ndarray, "Q 2"]:
        """The number of tokens of source and target of each pair."""
        return self.examples.lengths_of(self.pairs)


class _Planned(NamedTuple):
    """A chunk that is ready for its batches to be made."""

    examples: Examples  # this process's pairs
    plans: list[Plan]  # this process's part of the batches
    drawn: list[tuple[int, ...]]  # as in `Loaded`


class Loader:
    """Endless training batches: a function of (examples, config) and the position.

    UserError: `data.batch_tokens` or `data.packed_length` cannot hold the longest pair.
    """

    def __init__(self, examples: Examples, config: Config, shard: Shard = WHOLE) -> None:
        self.examples, self._config, self._shard = examples, config, shard
        sizes = examples.sizes or (len(examples),)
        self._corpora = len(sizes)
        self._order = make_order(sizes, config.data, config.train.seed)
        self.chunks = self._order.chunks(CHUNK)  # in an epoch
        first = self._gathered(self._read(0))  # its lengths stand for those of all
        self.shapes = _shapes(examples, config, first.lengths)
        plans = self._plan(first.lengths, 0)
        self._first = self._taken(first, plans)
        slots = sum(plan.shape.rows * (plan.shape.source + plan.shape.target) for plan in plans)
        self.non_padding_fraction = float(first.lengths.sum()) / slots
        """The fraction of slots that hold tokens, over both sides, in the first chunk."""
        self.batches_per_epoch = -(-len(plans) * self._order.epoch // len(first.pairs))
        """The number of batches in an epoch, estimated from the first chunk. Exact where an epoch
        is one chunk and nothing is sampled."""

    def batches(self, position: int = 0) -> Generator[Loaded, None, None]:
        """Yields the batches from `position` on, without end.

        Background threads read and sample the next chunk while the batches of this one are used,
        and make two batches ahead. They end when the generator is closed.
        """
        chunk, start = position >> _BITS, position & ((1 << _BITS) - 1)
        packed, start_id = self._config.data.packing, self._config.model.start_id
        make = partial(make_batch, packed=packed, start_id=start_id)
        for examples, plans, drawn in self._planned(chunk):
            epoch, number = divmod(chunk, self.chunks)
            batches = prefetch(map(partial(make, examples), plans[start:]))
            for i, batch in enumerate(batches, start):
                name = f"epoch {epoch}, chunk {number}, batch {i}"
                after = (chunk << _BITS) + i + 1 if i + 1 < len(plans) else (chunk + 1) << _BITS
                yield Loaded(batch, after, self.epoch(after), name, drawn[i])
            chunk, start = chunk + 1, 0

    def epoch(self, position: int) -> int:
        """Returns the epoch that `position` is in, from 0."""
        return (position >> _BITS) // self.chunks

    def _planned(self, first: int) -> Iterator[_Planned]:
        """Yields this process's pairs and batches of each chunk from `first` on."""

        def plan(chunk: int, read: _Read | None) -> _Planned:
            if read is None:
                return self._first
            whole = self._gathered(read)
            return self._taken(whole, self._plan(whole.lengths, chunk))

        # The loader keeps what it has planned of the first chunk.
        read = ((i, self._read(i) if i else None) for i in itertools.count(first))
        if self._config.tokenizer.sampling and self._shard.process[1] > 1:
            return itertools.starmap(plan, prefetch(read, 1))  # `gather` is called in this thread
        return prefetch(itertools.starmap(plan, read), 1)

    def _read(self, chunk: int) -> _Read:
        """Returns what this process reads of a chunk."""
        drawn = self._order.draw(chunk, *self._order.bounds(chunk, CHUNK))
        corpora = np.searchsorted(np.cumsum(self.examples.sizes), drawn.pairs, side="right")
        sampling, seed = self._config.tokenizer.sampling, self._config.train.seed
        if not sampling:
            return _Read(self.examples, drawn.pairs, corpora)
        process, count = self._shard.process
        part = Drawn(*(np.array_split(each, count)[process] for each in drawn))
        sampled = self.examples.sample(part, sampling, seed, self.examples.lengths.longest())
        return _Read(sampled, np.arange(len(part.pairs)), corpora)

    def _gathered(self, read: _Read) -> _Read:
        """Returns the whole chunk.

        The sampled ids are gathered, since that takes much less time than to sample again those of
        this process's rows, which are known only after the plan.
        """
        if not self._config.tokenizer.sampling:
            return read
        gather, sides = self._shard.gather, (read.examples.source, read.examples.target)
        whole = [Ragged.of_lengths(gather(side.ids), gather(side.lengths())) for side in sides]
        examples = read.examples.with_ids(*whole)
        return read._replace(examples=examples, pairs=np.arange(len(examples)))

    def _plan(self, lengths: Int[np.ndarray, "P 2"], chunk: int) -> list[Plan]:
        """Returns the batches of a chunk in the order of their use, which is random."""
        packs, shapes, seed = self._config.data.packing, self.shapes, self._config.train.seed
        plans = buckets.pack(lengths, shapes[0]) if packs else buckets.group(lengths, shapes)
        return [plans[i] for i in random_order(len(plans), seed, BATCHES, chunk)]

    def _taken(self, whole: _Read, plans: list[Plan]) -> _Planned:
        """Returns the pairs in this process's rows, in memory, and its part of the batches."""
        counts = [np.bincount(whole.corpora[p.pairs], minlength=self._corpora) for p in plans]
        parts = [take_rows(plan, self._shard) for plan in plans]
        # The pairs are copied in the order of their use: those of a batch are a range of them.
        pairs = [part.pairs for part in parts]
        ends = np.cumsum([*map(len, pairs)])
        ranges = np.split(np.arange(ends[-1]), ends[:-1])
        plans = [part._replace(pairs=here) for part, here in zip(parts, ranges, strict=True)]
        examples = whole.examples.take(whole.pairs[np.concatenate(pairs)])
        return _Planned(examples, plans, [tuple(each.tolist()) for each in counts])


def _shapes(examples: Examples, config: Config, first: Int[np.ndarray, "P 2"]) -> tuple[Shape, ...]:
    """Returns the shapes of all batches.

    first: the lengths in the first chunk. UserError: as `Loader`.
    """
    options, lengths, longest = config.data, examples.lengths, examples.lengths.longest()
    if options.packing:
        most, width = options.batch_tokens, options.packed_length
        return (buckets.packed_shape(int(longest.max()), most, width),)
    if config.tokenizer.sampling:  # the longest pair must fit with its ids as they are
        lengths = Lengths.of(np.concatenate([first, longest[None]]))
    return buckets.choose_shapes(lengths, options.batch_tokens, options.shapes)


def evaluation_batches(
    examples: Examples, config: Config, shard: Shard = WHOLE, lengths: Lengths | None = None
) -> Iterator[Batch]:
    """Yields every pair once, neither shuffled nor packed, in at most `data.shapes` shapes.

    The shapes are chosen for `lengths`, by default those of the examples. Batches exceed
    `data.batch_tokens` where the longest pairs would not fit otherwise.
    """
    options, start_id = config.data, config.model.start_id
    lengths = lengths or examples.lengths
    batch_tokens = max(options.batch_tokens, buckets.ROWS_MULTIPLE * int(lengths.longest().max()))
    shapes = buckets.choose_shapes(lengths, batch_tokens, options.shapes)
    for plan in buckets.group(examples.lengths_of(np.arange(len(examples))), shapes):
        part = take_rows(plan, shard)
        yield make_batch(examples, part, packed=False, start_id=start_id)


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


def take_rows(plan: Plan, shard: Shard) -> Plan:
    """Returns the part of a batch that this process makes: some of its rows."""
    local, count = shard.parts
    height = plan.shape.padded(shard.devices).rows // count  # rows of a part
    part, row = np.divmod(plan.rows, height)
    here = np.isin(part, local)
    # The parts that are made here follow each other, whatever lies between them elsewhere.
    rows = np.searchsorted(local, part) * height + row
    taken = (each[here] for each in (plan.pairs, rows, plan.starts, plan.segments))
    return Plan(plan.shape._replace(rows=height * len(local)), *taken)


def make_batch(examples: Examples, plan: Plan, *, packed: bool, start_id: int) -> Batch:
    """Returns the arrays of `plan`."""
    source, target = examples.source.take(plan.pairs), examples.target.take(plan.pairs)
    target_in = np.roll(target.ids, 1)
    target_in[target.offsets[:-1]] = start_id
    to_source, to_target = partial(_scatter, plan, 0, source), partial(_scatter, plan, 1, target)
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


def _scatter(
    plan: Plan, side: int, sentences: Ragged, values: Int[np.ndarray, " N"]
) -> Int32[np.ndarray, "B W"]:
    """Returns an array with a value for each token of the sentences of a side where `plan` says,
    and `PAD` elsewhere."""
    rows, starts = (np.repeat(x, sentences.lengths()) for x in (plan.rows, plan.starts[:, side]))
    array = np.full((plan.shape.rows, plan.shape[side + 1]), PAD, np.int32)
    array[rows, starts + _positions(sentences)] = values
    return array


def _positions(sentences: Ragged) -> Int[np.ndarray, " N"]:
    """Returns the position of each token in its sentence, from 0."""
    return np.arange(len(sentences.ids)) - np.repeat(sentences.offsets[:-1], sentences.lengths())
