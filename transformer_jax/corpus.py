"""Where pairs of sentences come from, and the cache of their ids.

A corpus is a string: `grammar` or `recipes` (built in; `grammar:test` names a split),
`SOURCE,TARGET` (two text files), `FILE.tsv` or `FILE.jsonl`; each file may be gzipped (`.gz`). Only
a line feed ends a line. This file knows nothing of batches.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeGuard

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64

from transformer_jax import grammar, recipes
from transformer_jax.config import DataConfig
from transformer_jax.tokenizer import EOS, Tokenizers

_BUILT_IN = {"grammar": grammar, "recipes": recipes}
_CHUNK = 65_536
_FORMAT = 1
_PATIENCE = 600.0  # seconds
_FILES = {
    "source.ids": "<i4",
    "source.offsets": "<i8",
    "target.ids": "<i4",
    "target.offsets": "<i8",
}
"""The files of a cache entry, raw numbers of these types."""


def read_pairs(
    corpus: str, fields: tuple[str, str] = ("source", "target"), split: str = "train"
) -> Iterator[tuple[str, str]]:
    """The pairs of `corpus`, one after the other.

    `fields`: the two names in a JSONL line. `split`: which part of a built-in corpus is meant.
    ValueError: no such corpus or file, no pair in it, or a line that is none, by its number.
    """
    kind, names = _parse(corpus, split)
    pairs = {
        "built-in": lambda: _built_in(*names),
        "text": lambda: _parallel(names[0], names[1]),
        "tsv": lambda: _tab_separated(names[0]),
        "jsonl": lambda: _json_lines(names[0], fields),
    }[kind]()
    empty = True
    for pair in pairs:
        empty = False
        yield pair
    if empty:
        raise ValueError(f"{corpus}: empty; must hold at least one pair of sentences")


def read_lines(path: str) -> Iterator[str]:
    """The lines of a text file without their ends; "-" is standard input.

    ValueError: missing, unreadable, a damaged .gz, or not UTF-8 (line and byte are named).
    """
    with _open(path) as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}: line {number}, byte {error.start + 1}:"
                    f" 0x{raw[error.start]:02x} is not UTF-8; must be UTF-8 text"
                ) from error
            yield line.removesuffix("\n").removesuffix("\r")


def digest(corpus: str, split: str = "train") -> str:
    """SHA-256 of the corpus's text; compressed or not makes no difference."""
    kind, names = _parse(corpus, split)
    total = hashlib.sha256()
    if kind == "built-in":
        for source, target in _built_in(*names):
            total.update(f"{source}\t{target}\n".encode())
        return total.hexdigest()
    for name in names:
        text = hashlib.sha256()
        with _open(name) as file:
            while block := file.read(1 << 20):
                text.update(block)
        total.update(text.digest())
    return total.hexdigest()


def _parse(corpus: str, split: str) -> tuple[str, list[str]]:
    """(kind, the built-in corpus and its split or the files)."""
    name, _, part = corpus.partition(":")
    if name in _BUILT_IN:
        return "built-in", [name, part or split]
    if corpus.count(",") == 1:
        return "text", corpus.split(",")
    for kind in ("tsv", "jsonl"):
        if corpus.removesuffix(".gz").endswith(f".{kind}"):
            return kind, [corpus]
    raise ValueError(
        f"corpus {corpus!r}: must be grammar, recipes, either with :SPLIT, SOURCE,TARGET (two text"
        " files), FILE.tsv or FILE.jsonl; files may end in .gz"
    )


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    """A file's bytes, decompressed; what goes wrong in reading them is a ValueError."""
    try:
        if path == "-":
            yield sys.stdin.buffer
        elif path.endswith(".gz"):
            with gzip.open(path) as file:
                yield io.BufferedReader(file)  # reads lines several times faster
        else:
            with Path(path).open("rb") as file:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: damaged gzip file ({error})") from error
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; must be a readable file") from error


def _built_in(name: str, split: str) -> Iterator[tuple[str, str]]:
    return ((pair.source, pair.target) for pair in _BUILT_IN[name].load(split))


def _parallel(source: str, target: str) -> Iterator[tuple[str, str]]:
    counts = [0, 0]
    for lines in itertools.zip_longest(read_lines(source), read_lines(target)):
        counts = [n + (line is not None) for n, line in zip(counts, lines, strict=True)]
        if counts[0] == counts[1]:
            yield lines
    if counts[0] != counts[1]:
        raise ValueError(
            f"{source} has {counts[0]} lines and {target} has {counts[1]}: parallel files must have"
            " as many lines as each other"
        )


def _tab_separated(path: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(read_lines(path), 1):
        source, *rest = line.split("\t")
        if len(rest) != 1:
            raise ValueError(
                f"{path}: line {number}: {len(rest)} tabs; must be SOURCE, tab, TARGET"
            )
        yield source, rest[0]


def _json_lines(path: str, fields: tuple[str, str]) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(read_lines(path), 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {number}: not JSON ({error})") from error
        values = record if isinstance(record, dict) else {}
        source, target = (values.get(field) for field in fields)
        if not _is_text(source) or not _is_text(target):
            raise ValueError(
                f"{path}: line {number}: must be an object with Unicode texts in {fields[0]!r} and"
                f" {fields[1]!r} (data.fields)"
            )
        yield source.replace("\n", " "), target.replace("\n", " ")


def _is_text(value: object) -> TypeGuard[str]:
    """Whether a JSON value is a string that can be written as UTF-8."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


class Ragged(NamedTuple):
    """Rows of different lengths, one after the other: row i is ids[offsets[i] : offsets[i + 1]]."""

    ids: Int32[np.ndarray, " N"]
    offsets: Int64[np.ndarray, " P+1"]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return cls(np.fromiter(itertools.chain.from_iterable(rows), np.int32), offsets)

    def row(self, index: int) -> Int32[np.ndarray, " N"]:
        return np.asarray(self.ids[self.offsets[index] : self.offsets[index + 1]])

    def lengths(self) -> Int32[np.ndarray, " P"]:
        return np.diff(self.offsets).astype(np.int32)

    def take(self, rows: Int[np.ndarray, " Q"] | Bool[np.ndarray, " P"]) -> Ragged:
        """The named rows, in memory."""
        starts, ends = self.offsets[:-1][rows], self.offsets[1:][rows]
        offsets = np.concatenate([[0], np.cumsum(ends - starts)])
        places = np.repeat(starts - offsets[:-1], ends - starts) + np.arange(offsets[-1])
        return Ragged(np.asarray(self.ids[places]), offsets)


class Report(NamedTuple):
    """How many pairs of a corpus are used, and how many are left out for which reason."""

    kept: int
    empty: int
    over_long: int
    ratio: int

    @property
    def left_out(self) -> int:
        """How many pairs are not used."""
        return self.empty + self.over_long + self.ratio

    def __str__(self) -> str:
        return (
            f"{self.kept:,} pairs; left out: {self.empty:,} with an empty side,"
            f" {self.over_long:,} over-long, {self.ratio:,} of unlike lengths"
        )


@dataclasses.dataclass(frozen=True)
class Examples:
    """Pairs as ids; every row ends with `EOS`. Corpora are memory-mapped, windows in memory."""

    source: Ragged
    target: Ragged
    tokenizers: Tokenizers
    report: Report

    def __len__(self) -> int:
        return len(self.source.offsets) - 1

    @property
    def lengths(self) -> Int32[np.ndarray, "P 2"]:
        """Tokens of source and target, `EOS` included."""
        return np.stack([self.source.lengths(), self.target.lengths()], axis=1)

    def pair(self, index: int) -> tuple[Int32[np.ndarray, " S"], Int32[np.ndarray, " T"]]:
        return self.source.row(index), self.target.row(index)

    def take(self, pairs: Int[np.ndarray, " Q"]) -> Examples:
        """The named pairs, in memory."""
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
        """The named pairs with subwords sampled anew: a function of (seed, epoch, pair).

        sampling: as `Tokenizer.sample` has it. A pair keeps its ids where the new ones are more
        than `limits` on a side.
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
        source, target = (Ragged.of(side) for side in zip(*rows, strict=True))
        return dataclasses.replace(self, source=source, target=target)


def tokenise(
    corpora: Sequence[str],
    tokenizers: Tokenizers,
    config: DataConfig,
    *,
    max_length: int,
    split: str,
    filters: bool,
    process_index: int = 0,
) -> Examples:
    """The pairs of all `corpora` as ids, out of the cache where it has them.

    Over-long pairs, of more than `max_length` tokens on a side (`EOS` included), are left out; with
    `filters` also those with an empty side and those whose lengths differ by more than
    `data.max_ratio`; all counted in the report. Process 0 fills the cache, the others wait for it.
    ValueError: bad input, no pair left, or no space for the cache; nothing is written then.
    """
    max_ratio = config.max_ratio if filters else None
    key = json.dumps(
        [
            _FORMAT,
            [(_parse(corpus, split)[0], digest(corpus, split)) for corpus in corpora],
            [tokenizer.digest for tokenizer in tokenizers],
            [config.fields, max_length, max_ratio],
        ]
    )
    folder = Path(config.cache) if config.cache else _user_cache()
    entry = folder / hashlib.sha256(key.encode()).hexdigest()
    found = _read_entry(entry, tokenizers)
    if found is None and process_index:
        return _wait(entry, tokenizers)
    if found is None:
        pairs = itertools.chain.from_iterable(
            read_pairs(corpus, config.fields, split) for corpus in corpora
        )
        chunks = _encode(pairs, tokenizers, config.workers, max_length, max_ratio)
        _write_entry(entry, chunks, ", ".join(corpora))
        found = _read_entry(entry, tokenizers)
        assert found is not None, entry
    return found


def _user_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "transformer_jax" / "corpora"


def _encode(
    pairs: Iterable[tuple[str, str]],
    tokenizers: Tokenizers,
    threads: int,
    max_length: int,
    max_ratio: float | None,
) -> Iterator[tuple[Ragged, Ragged, Report]]:
    """Chunk by chunk: ids of the pairs that stay, and the counts."""
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
        over_long = ~empty & (longer > max_length)
        ratio = none if max_ratio is None else ~empty & ~over_long & (longer > max_ratio * shorter)
        kept = ~(empty | over_long | ratio)
        counts = Report(*(int(np.sum(mask)) for mask in (kept, empty, over_long, ratio)))
        yield source.take(kept), target.take(kept), counts


def _write_entry(entry: Path, chunks: Iterator[tuple[Ragged, Ragged, Report]], name: str) -> None:
    """Writes beside `entry`, then renames: an entry is whole or not there."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", dir=entry.parent))
        try:
            report = _write_files(temporary, chunks)
            if not report.kept:
                raise ValueError(f"{name}: no pair is left: {report}")
            _move(temporary, entry)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise ValueError(
            f"data.cache: {error.strerror} while writing to {entry.parent}; must be a folder with"
            " enough space"
        ) from error


def _move(temporary: Path, entry: Path) -> None:
    """Renames, unless another run has put the whole entry there in the meantime."""
    try:
        temporary.rename(entry)
    except OSError:
        if not _whole(entry):
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


def _whole(entry: Path) -> Report | None:
    """The report of a cache entry; None where the entry is missing or damaged."""
    try:
        contents = json.loads((entry / "report.json").read_text())
        sound = contents["digests"] == {name: _file_digest(entry / name) for name in _FILES}
        return Report(**contents["report"]) if sound else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_entry(entry: Path, tokenizers: Tokenizers) -> Examples | None:
    """The examples of a cache entry; None where it is missing or damaged."""
    report = _whole(entry)
    if report is None:
        return None
    # Views as plain arrays: each slice of a memmap costs microseconds.
    arrays = [np.asarray(np.memmap(entry / name, kind, "r")) for name, kind in _FILES.items()]
    return Examples(Ragged(*arrays[:2]), Ragged(*arrays[2:]), tokenizers, report)


def _wait(entry: Path, tokenizers: Tokenizers) -> Examples:
    """Waits as long as process 0 goes on writing."""
    alive = time.time()
    while (found := _read_entry(entry, tokenizers)) is None:
        with suppress(OSError):  # files come and go
            files = entry.parent.glob(f"{entry.name}.*/*")
            alive = max([alive, *(file.stat().st_mtime for file in files)])
        if time.time() > alive + _PATIENCE:
            raise ValueError(
                f"data.cache={entry.parent}: process 0 has written nothing for {_PATIENCE:.0f}"
                " seconds; must be a folder that all processes share"
            )
        time.sleep(0.5)
    return found
