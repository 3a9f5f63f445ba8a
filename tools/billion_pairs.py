"""Measures the loader on corpora of up to a billion pairs.

The pairs of the largest corpora are computed from their index, so they need no disk; those of the
corpus on the disk are text, which is tokenized into the cache.
"""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from transformer_jax.config import Config, DataConfig, TokenizerConfig
from transformer_jax.data.buckets import Lengths
from transformer_jax.data.dataset import Examples, Report, tokenize
from transformer_jax.data.loader import Loaded, Loader
from transformer_jax.data.ragged import Ragged
from transformer_jax.text import tokenizer
from transformer_jax.text.corpus import Corpus

BATCHES = 200
VOCABULARY, LONGEST = 8000, 48
PRIMES = (7, 61, 547, 1279, 2011, 2399, 2801)


class Computed(Examples):
    """Pairs whose ids are functions of their index."""

    count: int

    @classmethod
    def of(cls, count: int) -> Computed:
        """Returns `count` pairs of 2 to `LONGEST` tokens on each side."""
        text = [("the small dog sees a house", "der kleine hund sieht ein haus")] * 9
        tokenizers = tokenizer.train(text, TokenizerConfig(vocabulary=300))
        pairs = cls(Ragged.of([]), Ragged.of([]), tokenizers, Report(count, 0, 0, 0))
        object.__setattr__(pairs, "count", count)
        widths = np.arange(LONGEST + 1)
        lengths = Lengths(np.where(widths > 1, count // LONGEST, 0), np.stack([widths] * 2, axis=1))
        object.__setattr__(pairs, "lengths", lengths)
        return pairs

    def __len__(self) -> int:
        return self.count

    def lengths_of(self, pairs: Int[np.ndarray, " Q"]) -> Int[np.ndarray, "Q 2"]:
        """Returns lengths that are a hash of the index."""
        mixed = pairs.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        source = 2 + (mixed >> np.uint64(40)) % np.uint64(LONGEST - 1)
        target = 2 + (mixed >> np.uint64(20)) % np.uint64(LONGEST - 1)
        return np.stack([source, target], axis=1).astype(np.int32)

    def take(self, pairs: Int[np.ndarray, " Q"]) -> Examples:
        """Returns pairs in each of which an id that depends on the index is repeated."""
        ids = (4 + pairs % VOCABULARY).astype(np.int32)
        sides = self.lengths_of(pairs).T
        return self.with_ids(*(Ragged.of_lengths(np.repeat(ids, side), side) for side in sides))


def billion_pairs(computed: Sequence[int], on_disk: int, folder: Path) -> list[dict[str, Any]]:
    """Returns `measure` of corpora of these numbers of pairs; the one on the disk is in `folder`.

    tokenize_s, open_s: seconds that it takes to open the text at first, and from the cache.
    """
    rows = [{"kind": "computed"} | measure(Computed.of(count)) for count in computed]
    path = folder / "pairs.tsv"
    write_text(path, on_disk)
    began = time.monotonic()
    load_text(path)
    tokenized = time.monotonic()
    examples = load_text(path)
    times = {"tokenize_s": tokenized - began, "open_s": time.monotonic() - tokenized}
    return [*rows, {"kind": "disk"} | times | measure(examples)]


def write_text(path: Path, count: int) -> None:
    """Writes a corpus of `count` pairs of 2 to 7 words."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for index in range(count):
            text = " ".join(f"w{(index * prime) % 3001:x}" for prime in PRIMES[: 2 + index % 6])
            file.write(f"{text}\t{text[::-1]}\n")


def load_text(path: Path) -> Examples:
    """Returns the pairs of a corpus, tokenized into a cache beside it."""
    corpus = Corpus(str(path))
    first = itertools.islice(corpus.pairs(), 100_000)
    tokenizers = tokenizer.train(first, TokenizerConfig(vocabulary=2000))
    config = DataConfig(cache=str(path.parent / "cache"))
    return tokenize([corpus], tokenizers, config, max_length=256, filters=True)


def measure(examples: Examples) -> dict[str, Any]:
    """Returns what it takes to load batches from the start and from the middle of an epoch.

    - peak_mib: memory of Python and NumPy, without files that are mapped into memory, whose pages
      the system takes back when it likes.
    - resumed: whether batches after a position are those of an epoch that went through it.
    """
    config = Config(data=DataConfig(shapes=4))
    began = time.monotonic()
    loader = Loader(examples, config)
    [first] = _take(loader, 0, 1)
    first_s = time.monotonic() - began
    began = time.monotonic()
    _take(loader, first.after, BATCHES)
    batch_ms = (time.monotonic() - began) * 1e3 / BATCHES
    middle = loader.chunks // 2 << 20
    began = time.monotonic()
    whole = _take(Loader(examples, config), middle, BATCHES)
    middle_s = time.monotonic() - began
    tracemalloc.start()  # which takes time, too
    again = _take(Loader(examples, config), whole[9].after, BATCHES - 10)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "pairs": len(examples),
        "peak_mib": peak / 2**20,
        "first_batch_s": first_s,
        "batch_ms": batch_ms,
        "middle_s": middle_s,
        "resumed": all(map(_same, whole[10:], again)),
    }


def _take(loader: Loader, position: int, count: int) -> list[Loaded]:
    with closing(loader.batches(position)) as batches:
        return list(itertools.islice(batches, count))


def _same(one: Loaded, other: Loaded) -> bool:
    pairs = zip(one.batch[:3], other.batch[:3], strict=True)
    return one.after == other.after and all(np.array_equal(a, b) for a, b in pairs)
