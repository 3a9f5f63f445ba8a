"""Pairs of sentences as ids, and their cache on disk. Knows nothing of batches."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from transformer_jax.config import Config
from transformer_jax.data import entry as cache
from transformer_jax.data.buckets import Lengths
from transformer_jax.data.entry import Entry
from transformer_jax.data.order import Drawn
from transformer_jax.data.ragged import Parts, Ragged
from transformer_jax.errors import UserError
from transformer_jax.files import json_digest
from transformer_jax.special_ids import EOS
from transformer_jax.text.corpus import Corpus, Pair
from transformer_jax.text.tokenizer import Tokenizers

_CHUNK = 65_536  # pairs tokenized at a time
_FORMAT = 6  # of a cache entry
_PATIENCE = 600.0  # seconds
_SIDES = ("source", "target")


class Report(NamedTuple):
    """The number of pairs that are used, and of those left out for each reason."""

    kept: int
    empty: int
    too_long: int
    length_ratio: int

    @property
    def left_out(self) -> int:
        """The number of pairs that are not used."""
        return self.empty + self.too_long + self.length_ratio

    def plus(self, other: Report) -> Report:
        """Returns the numbers of the pairs of both."""
        return Report(*(a + b for a, b in zip(self, other, strict=True)))

    def __str__(self) -> str:
        return (
            f"{self.kept:,} pairs; left out: {self.empty:,} with an empty side,"
            f" {self.too_long:,} too long, {self.length_ratio:,} by length ratio"
        )


@dataclasses.dataclass(frozen=True)
class Examples:
    """Pairs of sentences as ids; every row ends with `EOS`.

    The ids of whole corpora are memory-mapped; those of `take` and `sample` are in memory. sizes:
    the number of pairs of each corpus, which follow each other; empty: there is one corpus.
    entries: of the cache, which hold the pairs of each corpus.
    """

    source: Ragged | Parts
    target: Ragged | Parts
    tokenizers: Tokenizers
    report: Report
    sizes: tuple[int, ...] = ()
    entries: tuple[Entry, ...] = ()

    def __len__(self) -> int:
        return self.source.size

    @cached_property
    def lengths(self) -> Lengths:
        """How many pairs have which numbers of tokens, including `EOS`."""
        if self.entries:
            return reduce(Lengths.joined, (entry.lengths for entry in self.entries))
        return Lengths.of(self.lengths_of(np.arange(len(self))))

    def lengths_of(self, pairs: Int[np.ndarray, " Q"]) -> Int32[np.ndarray, "Q 2"]:
        """Returns the number of tokens of source and target of the pairs with these indices."""
        return np.stack([side.lengths_of(pairs) for side in (self.source, self.target)], axis=1)

    def pair(self, index: int) -> tuple[Int32[np.ndarray, " S"], Int32[np.ndarray, " T"]]:
        """Returns the ids of source and target of one pair."""
        return self.source.row(index), self.target.row(index)

    def take(self, pairs: Int[np.ndarray, " Q"]) -> Examples:
        """Returns the pairs with these indices, in memory."""
        return self.with_ids(self.source.take(pairs), self.target.take(pairs))

    def with_ids(self, source: Ragged, target: Ragged) -> Examples:
        """Returns other pairs, in memory."""
        return Examples(source, target, self.tokenizers, self.report)

    def sample(
        self, drawn: Drawn, sampling: float, seed: int, limits: Int[np.ndarray, " 2"]
    ) -> Examples:
        """Returns the pairs that are drawn in freshly sampled subwords.

        The result is a function of (seed, pass, pair), where passes count how often a pair has been
        used before. `sampling` is that of `Tokenizer.sample`. A pair keeps its ids where sampling
        gives more than `limits` tokens on a side.
        """
        rows = []
        for pair, epoch in zip(drawn.pairs.tolist(), drawn.passes.tolist(), strict=True):
            old = [ids.tolist() for ids in self.pair(pair)]
            new = [
                [*tokenizer.sample(ids[:-1], sampling, seed, epoch, pair, side), EOS]
                for side, (tokenizer, ids) in enumerate(zip(self.tokenizers, old, strict=True))
            ]
            fits = len(new[0]) <= limits[0] and len(new[1]) <= limits[1]
            rows.append(new if fits else old)
        source, target = (Ragged.of([row[side] for row in rows]) for side in (0, 1))
        return self.with_ids(source, target)


def tokenize(
    corpora: Sequence[Corpus],
    tokenizers: Tokenizers,
    config: Config,
    *,
    filters: bool,
    pairs: Iterable[Pair] | None = None,
    process_index: int = 0,
) -> Examples:
    """Returns the pairs of all `corpora` as ids, from the cache if it holds them, each corpus in an
    entry of its own.

    Pairs of more than `model.max_length` tokens on a side (`EOS` included) and those without a
    source are left out. `filters` also leaves out pairs without a target and those whose lengths
    differ by more than a factor of `data.max_ratio`. The report counts them all. `pairs`, if
    given, are the pairs of the one corpus, which is then not read again. Process 0 fills the cache
    and the others wait for it.

    UserError: bad input, no pair left, or no space for the cache. No entry is then half written.
    """
    max_length, max_ratio = config.model.max_length, config.data.max_ratio if filters else None

    def fill(corpus: Corpus, append: Callable[[Ragged, Ragged], None]) -> dict[str, int]:
        # By chunks, so that the text of a corpus is never in memory as a whole.
        total, rest = Report(0, 0, 0, 0), iter(corpus.pairs() if pairs is None else pairs)
        while chunk := list(itertools.islice(rest, _CHUNK)):
            source, target = (
                _ended(*tokenizer.encode_all(texts, config.data.workers))
                for tokenizer, texts in zip(tokenizers, zip(*chunk, strict=True), strict=True)
            )
            kept, counts = _filter(source, target, max_length, max_ratio)
            append(source.take(kept), target.take(kept))
            total = total.plus(counts)
        return total._asdict()

    # The name of an entry is a digest of all that the ids depend on, so that it is never outdated.
    depends_on = [_FORMAT, [tokenizer.digest for tokenizer in tokenizers], max_length, max_ratio]
    opened = []
    for corpus in corpora:
        path = cache.cache_of(config.data) / json_digest([*depends_on, corpus.key])
        opened.append(_entry(path, partial(fill, corpus), process_index))
    reports = [Report(**entry.counts) for entry in opened]
    total = reduce(Report.plus, reports)
    if not total.kept:
        raise UserError(f"{', '.join(corpus.name for corpus in corpora)}: no pair is left: {total}")
    sources, targets = (tuple(getattr(entry, side) for entry in opened) for side in _SIDES)
    ids = (sources[0], targets[0]) if len(opened) == 1 else (Parts(sources), Parts(targets))
    return Examples(*ids, tokenizers, total, tuple(each.kept for each in reports), tuple(opened))


def _entry(path: Path, fill: cache.Fill, process_index: int) -> Entry:
    """Returns an entry of the cache, which process 0 writes if it is missing.

    The other processes wait for it as long as its files keep changing.
    """
    entry, began = cache.read(path), time.time()
    if entry is None and process_index == 0:
        cache.write(path, fill)
        entry = cache.read(path)
        assert entry is not None, path
    while entry is None:
        if min(time.time() - began, cache.idle_seconds(path)) > _PATIENCE:
            raise UserError(
                f"data.cache={path.parent}: process 0 has written nothing for {_PATIENCE:.0f}"
                " seconds; must be a folder that all processes share"
            )
        time.sleep(0.5)
        entry = cache.read(path)
    return entry


def _filter(
    source: Ragged, target: Ragged, max_length: int, max_ratio: float | None
) -> tuple[Bool[np.ndarray, " P"], Report]:
    """Returns which pairs are kept, and a report."""
    sources, targets = source.lengths(), target.lengths()
    shorter, longer = np.minimum(sources, targets), np.maximum(sources, targets)
    empty = (sources if max_ratio is None else shorter) == 1
    too_long = ~empty & (longer > max_length)
    uneven = ~empty & ~too_long & (longer > (max_ratio or np.inf) * shorter)
    kept = ~(empty | too_long | uneven)
    return kept, Report(*(int(np.sum(mask)) for mask in (kept, empty, too_long, uneven)))


def _ended(ids: Int32[np.ndarray, " N"], lengths: Int32[np.ndarray, " P"]) -> Ragged:
    """Returns the rows of these lengths with `EOS` at their ends."""
    return Ragged.of_lengths(np.insert(ids, np.cumsum(lengths), EOS), lengths + 1)
