"""Pairs of sentences as ids, and their cache on disk. Knows nothing of batches."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64

from transformer_jax.config import DataConfig
from transformer_jax.data.cache import cache_of, writing_to_cache
from transformer_jax.errors import UserError
from transformer_jax.json_text import parse_json
from transformer_jax.special_ids import EOS
from transformer_jax.text.corpus import Corpus, Pair
from transformer_jax.text.tokenizer import Tokenizers

_CHUNK = 65_536  # pairs tokenized at a time
_FORMAT = 2  # of a cache entry
_PATIENCE = 600.0  # seconds
_FILES = {
    "source.ids": "<i4",
    "source.offsets": "<i8",
    "target.ids": "<i4",
    "target.offsets": "<i8",
}
"""The arrays of a cache entry: the names of the files and the types of their raw numbers."""


class Ragged(NamedTuple):
    """Rows of different lengths in one array: row i is ids[offsets[i] : offsets[i + 1]]."""

    ids: Int32[np.ndarray, " N"]
    offsets: Int64[np.ndarray, " P+1"]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """Returns the concatenation of `rows`."""
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return cls(np.fromiter(itertools.chain.from_iterable(rows), np.int32), offsets)

    @classmethod
    def of_lengths(cls, ids: Int32[np.ndarray, " N"], lengths: Int32[np.ndarray, " P"]) -> Ragged:
        """Returns the rows of these lengths whose concatenation is `ids`."""
        return cls(ids, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))

    def row(self, index: int) -> Int32[np.ndarray, " N"]:
        """Returns the ids of one row."""
        return np.asarray(self.ids[self.offsets[index] : self.offsets[index + 1]])

    def lengths(self) -> Int32[np.ndarray, " P"]:
        """Returns the length of each row."""
        return np.diff(self.offsets).astype(np.int32)

    def take(self, rows: Int[np.ndarray, " Q"] | Bool[np.ndarray, " P"]) -> Ragged:
        """Returns the rows with these indices, or those where `rows` is true, copied to memory."""
        starts, ends = self.offsets[:-1][rows], self.offsets[1:][rows]
        offsets = np.concatenate([[0], np.cumsum(ends - starts)])
        indices = np.repeat(starts - offsets[:-1], ends - starts) + np.arange(offsets[-1])
        return Ragged(np.asarray(self.ids[indices]), offsets)


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

    def __str__(self) -> str:
        return (
            f"{self.kept:,} pairs; left out: {self.empty:,} with an empty side,"
            f" {self.too_long:,} too long, {self.length_ratio:,} by length ratio"
        )


@dataclasses.dataclass(frozen=True)
class Examples:
    """Pairs of sentences as ids; every row ends with `EOS`.

    The ids of whole corpora are memory-mapped; those of `take` and `sample` are in memory.
    """

    source: Ragged
    target: Ragged
    tokenizers: Tokenizers
    report: Report

    def __len__(self) -> int:
        return len(self.source.offsets) - 1

    @property
    def lengths(self) -> Int32[np.ndarray, "P 2"]:
        """The number of tokens of source and target, including `EOS`."""
        return np.stack([self.source.lengths(), self.target.lengths()], axis=1)

    def lengths_of(self, pairs: Int[np.ndarray, " Q"]) -> Int32[np.ndarray, "Q 2"]:
        """Returns the number of tokens of the pairs with these indices, as `lengths`."""
        ends = [
            (side.offsets[pairs], side.offsets[pairs + 1]) for side in (self.source, self.target)
        ]
        return np.stack([end - start for start, end in ends], axis=1).astype(np.int32)

    def pair(self, index: int) -> tuple[Int32[np.ndarray, " S"], Int32[np.ndarray, " T"]]:
        """Returns the ids of source and target of one pair."""
        return self.source.row(index), self.target.row(index)

    def take(self, pairs: Int[np.ndarray, " Q"]) -> Examples:
        """Returns the pairs with these indices, in memory."""
        return dataclasses.replace(
            self, source=self.source.take(pairs), target=self.target.take(pairs)
        )

    def sample(
        self,
        pairs: Int[np.ndarray, " Q"],
        sampling: float,
        seed: int,
        epoch: int,
        limits: Int[np.ndarray, " 2"],
    ) -> Examples:
        """Returns the pairs with these indices in freshly sampled subwords.

        The result is a function of (seed, epoch, pair). `sampling` is that of `Tokenizer.sample`.
        A pair keeps its ids where sampling gives more than `limits` tokens on a side.
        """
        rows = []
        for pair in pairs.tolist():
            old = [ids.tolist() for ids in self.pair(pair)]
            new = [
                [*tokenizer.sample(ids[:-1], sampling, seed, epoch, pair, side), EOS]
                for side, (tokenizer, ids) in enumerate(zip(self.tokenizers, old, strict=True))
            ]
            fits = len(new[0]) <= limits[0] and len(new[1]) <= limits[1]
            rows.append(new if fits else old)
        source, target = (Ragged.of([row[side] for row in rows]) for side in (0, 1))
        return dataclasses.replace(self, source=source, target=target)


def tokenize(
    corpora: Sequence[Corpus],
    tokenizers: Tokenizers,
    config: DataConfig,
    *,
    max_length: int,
    filters: bool,
    pairs: Iterable[Pair] | None = None,
    process_index: int = 0,
) -> Examples:
    """Returns the pairs of all `corpora` as ids, from the cache if it holds them.

    Pairs of more than `max_length` tokens on a side (`EOS` included) are left out. `filters` also
    leaves out pairs with an empty side and those whose lengths differ by more than a factor of
    `data.max_ratio`. The report counts them all. `pairs`, if given, are the pairs of `corpora`,
    which are then not read again. Process 0 fills the cache and the others wait for it.

    UserError: bad input, no pair left, or no space for the cache; nothing is written then.
    """
    max_ratio = config.max_ratio if filters else None
    entry = cache_of(config) / _entry_name(corpora, tokenizers, max_length, max_ratio)
    found = _read_entry(entry, tokenizers)
    if found is None and process_index:
        return _wait(entry, tokenizers)
    if found is None:
        if pairs is None:
            pairs = itertools.chain.from_iterable(corpus.pairs() for corpus in corpora)
        chunks = _encode(pairs, tokenizers, config.workers, max_length, max_ratio)
        _write_entry(entry, chunks, ", ".join(corpus.name for corpus in corpora))
        found = _read_entry(entry, tokenizers)
        assert found is not None, entry
    return found


def _entry_name(
    corpora: Sequence[Corpus], tokenizers: Tokenizers, max_length: int, max_ratio: float | None
) -> str:
    """Returns a digest of everything that the ids depend on."""
    key = [
        _FORMAT,
        [corpus.key for corpus in corpora],
        [tokenizer.digest for tokenizer in tokenizers],
        [max_length, max_ratio],
    ]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()


def _encode(
    pairs: Iterable[tuple[str, str]],
    tokenizers: Tokenizers,
    threads: int,
    max_length: int,
    max_ratio: float | None,
) -> Iterator[tuple[Ragged, Ragged, Report]]:
    """Yields the ids of the pairs that are kept, chunk by chunk, with a report of each chunk."""
    pairs = iter(pairs)
    while chunk := list(itertools.islice(pairs, _CHUNK)):
        source, target = (
            Ragged.of([[*ids, EOS] for ids in tokenizer.encode_all(texts, threads)])
            for tokenizer, texts in zip(tokenizers, zip(*chunk, strict=True), strict=True)
        )
        shorter = np.minimum(source.lengths(), target.lengths())
        longer = np.maximum(source.lengths(), target.lengths())
        none = np.zeros(len(chunk), bool)
        empty = none if max_ratio is None else shorter == 1
        too_long = ~empty & (longer > max_length)
        uneven = none if max_ratio is None else ~empty & ~too_long & (longer > max_ratio * shorter)
        kept = ~(empty | too_long | uneven)
        counts = Report(*(int(np.sum(mask)) for mask in (kept, empty, too_long, uneven)))
        yield source.take(kept), target.take(kept), counts


def _write_entry(entry: Path, chunks: Iterator[tuple[Ragged, Ragged, Report]], name: str) -> None:
    """Writes a cache entry in a temporary folder and renames it, so that no entry is partial."""
    with writing_to_cache(entry.parent):
        temporary = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", dir=entry.parent))
        try:
            report = _write_files(temporary, chunks)
            if not report.kept:
                raise UserError(f"{name}: no pair is left: {report}")
            _move(temporary, entry)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _move(temporary: Path, entry: Path) -> None:
    """Renames a finished entry, unless another run has completed the same one in the meantime."""
    try:
        temporary.rename(entry)
    except OSError:
        if not _stored_report(entry):
            shutil.rmtree(entry)
            temporary.rename(entry)


def _write_files(folder: Path, chunks: Iterator[tuple[Ragged, Ragged, Report]]) -> Report:
    total = Report(0, 0, 0, 0)
    ends = np.zeros(2, np.int64)
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / name).open("wb")) for name in _FILES}
        for side in ("source", "target"):
            files[f"{side}.offsets"].write(np.zeros(1, "<i8").tobytes())
        for source, target, counts in chunks:
            for i, (side, rows) in enumerate((("source", source), ("target", target))):
                files[f"{side}.ids"].write(rows.ids.astype("<i4").tobytes())
                files[f"{side}.offsets"].write((rows.offsets[1:] + ends[i]).astype("<i8").tobytes())
                ends[i] += rows.offsets[-1]
            total = Report(*(a + b for a, b in zip(total, counts, strict=True)))
    digests = {name: _file_digest(folder / name) for name in _FILES}
    contents = {"report": total._asdict(), "digests": digests}
    (folder / "report.json").write_text(json.dumps(contents, indent=1))
    return total


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stored_report(entry: Path) -> Report | None:
    """Returns the report of a cache entry, or None if the entry is missing or damaged."""
    try:
        contents = parse_json((entry / "report.json").read_bytes())
        sound = contents["digests"] == {name: _file_digest(entry / name) for name in _FILES}
        return Report(**contents["report"]) if sound else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_entry(entry: Path, tokenizers: Tokenizers) -> Examples | None:
    """Returns the examples of a cache entry, or None if it is missing or damaged."""
    report = _stored_report(entry)
    if report is None:
        return None
    # As plain arrays, since slicing a memmap takes microseconds.
    arrays = [np.asarray(np.memmap(entry / name, kind, "r")) for name, kind in _FILES.items()]
    return Examples(Ragged(*arrays[:2]), Ragged(*arrays[2:]), tokenizers, report)


def _wait(entry: Path, tokenizers: Tokenizers) -> Examples:
    """Returns the entry that process 0 writes. Waits as long as its files keep changing."""
    last_write = time.time()
    while (found := _read_entry(entry, tokenizers)) is None:
        with suppress(OSError):  # files come and go
            files = entry.parent.glob(f"{entry.name}.*/*")
            last_write = max([last_write, *(file.stat().st_mtime for file in files)])
        if time.time() > last_write + _PATIENCE:
            raise UserError(
                f"data.cache={entry.parent}: process 0 has written nothing for {_PATIENCE:.0f}"
                " seconds; must be a folder that all processes share"
            )
        time.sleep(0.5)
    return found
