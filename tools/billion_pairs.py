"""Measures the loader on corpora of up to a billion pairs.

    python -m tools.billion_pairs

The pairs of the largest corpora are computed from their index, so they need no disk; those of the
corpus on the disk are text, which is tokenized into the cache. Each corpus is loaded in a process
of its own: from the start, from the middle of the epoch, and resumed there. Prints JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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

COMPUTED = (10**6, 10**9)
ON_DISK = 10**7
BATCHES = 200
VOCABULARY, LONGEST = 8000, 48
FOLDER = Path("runs/billion_pairs")


class Computed(Examples):
    """Pairs whose ids are functions of their index."""

    count: int

    @classmethod
    def of(cls, count: int) -> Computed:
        """Returns `count` pairs of 2 to `LONGEST` tokens on each side."""
        none = Ragged.of([])
        made = cls(none, none, _tokenizers(), Report(count, 0, 0, 0))
        object.__setattr__(made, "count", count)
        widths = np.arange(LONGEST + 1)
        lengths = Lengths(np.where(widths > 1, count // LONGEST, 0), np.stack([widths] * 2, axis=1))
        object.__setattr__(made, "lengths", lengths)
        return made

    def __len__(self) -> int:
        return self.count

    def lengths_of(self, pairs: Int[np.ndarray, " Q"]) -> Int[np.ndarray, "Q 2"]:
        """Returns lengths that are a hash of the index."""
        mixed = pairs.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        source = 2 + (mixed >> np.uint64(40)) % np.uint64(LONGEST - 1)
        target = 2 + (mixed >> np.uint64(20)) % np.uint64(LONGEST - 1)
        return np.stack([source, target], axis=1).astype(np.int32)

    def take(self, pairs: Int[np.ndarray, " Q"]) -> Examples:
        """Returns ids that begin with the digits of the index, and count on from there."""
        sides = []
        for lengths in self.lengths_of(pairs).T:
            first = np.repeat(pairs % VOCABULARY, lengths)
            place = np.arange(len(first)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            ids = (4 + (first + place) % (VOCABULARY - 4)).astype(np.int32)
            sides.append(Ragged.of_lengths(ids, lengths))
        return self.with_ids(*sides)


def _tokenizers() -> tokenizer.Tokenizers:
    text = [("the small dog sees a house", "der kleine hund sieht ein haus")] * 9
    return tokenizer.train(text, TokenizerConfig(vocabulary=300))


def write_text(path: Path, count: int) -> None:
    """Writes a corpus of `count` pairs of 2 to 7 words, unless it is there already."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    words = np.array([f"w{number:x}" for number in range(3000)])
    with path.with_suffix(".part").open("w", encoding="utf-8") as file:
        for start in range(0, count, 100_000):
            lengths = draw.integers(2, 8, min(100_000, count - start))
            chosen = iter(words[draw.integers(0, len(words), lengths.sum())].tolist())
            for length in lengths.tolist():
                text = " ".join(itertools.islice(chosen, length))
                file.write(f"{text}\t{text[::-1]}\n")
    path.with_suffix(".part").rename(path)


def load_text(path: Path) -> Examples:
    """Returns the pairs of the corpus, tokenized into a cache beside it."""
    corpus = Corpus(str(path))
    made = tokenizer.train(
        itertools.islice(corpus.pairs(), 100_000), TokenizerConfig(vocabulary=2000)
    )
    config = DataConfig(cache=str(path.parent / "cache"))
    return tokenize([corpus], made, config, max_length=256, filters=True)


def measure(examples: Examples) -> dict[str, Any]:
    """Returns what it takes to load batches from the start and from the middle of an epoch.

    `resumed` tells whether batches after a position are those of an epoch that went through it.
    """
    config = Config(data=DataConfig(shapes=4))
    with _peak() as peak:
        began = time.monotonic()
        loader = Loader(examples, config)
        first = _take(loader, 0, 1)
        first_s = time.monotonic() - began
        began = time.monotonic()
        _take(loader, first[0].after, BATCHES)
        batch_ms = (time.monotonic() - began) * 1e3 / BATCHES
        middle = loader.chunks // 2 << 20
        began = time.monotonic()
        found = _take(Loader(examples, config), middle, BATCHES)
        middle_s = time.monotonic() - began
        again = _take(Loader(examples, config), found[9].after, BATCHES - 10)
    return {
        "pairs": len(examples),
        "peak_mib": peak[0],
        "first_batch_s": first_s,
        "batch_ms": batch_ms,
        "middle_s": middle_s,
        "resumed": all(map(_same, found[10:], again)),
    }


def _take(loader: Loader, position: int, count: int) -> list[Loaded]:
    batches = loader.batches(position)
    found = list(itertools.islice(batches, count))
    batches.close()
    return found


def _same(one: Loaded, other: Loaded) -> bool:
    pairs = zip(one.batch[:3], other.batch[:3], strict=True)
    return one.after == other.after and all(np.array_equal(a, b) for a, b in pairs)


@contextmanager
def _peak() -> Iterator[list[float]]:
    """Yields a list that holds, in the end, the growth of the process's own memory in MiB.

    The pages of memory-mapped files do not count, since the system takes them back when it likes.
    """
    found, ended, before = [0.0], threading.Event(), _own_memory()

    def watch() -> None:
        while not ended.wait(0.01):
            found[0] = max(found[0], _own_memory() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def _own_memory() -> float:
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+) kB", status)[0]) / 1024


def billion_pairs(
    computed: tuple[int, ...] = COMPUTED, on_disk: int = ON_DISK, folder: Path = FOLDER
) -> list[dict[str, Any]]:
    """Returns `measure` of each corpus, each measured in a process of its own."""
    path = folder / f"{on_disk}.tsv"
    write_text(path, on_disk)
    began = time.monotonic()
    load_text(path)
    tokenize_s = time.monotonic() - began
    rows = [_in_process("--computed", str(count)) for count in computed]
    rows = [{"kind": "computed"} | row for row in rows]
    return [*rows, {"kind": "disk", "tokenize_s": tokenize_s} | _in_process("--text", str(path))]


def _in_process(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.billion_pairs", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def main() -> None:
    """Measures one corpus, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--computed", type=int, metavar="N")
    parser.add_argument("--text", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.computed:
        found: Any = measure(Computed.of(options.computed))
    elif options.text:
        began = time.monotonic()
        examples = load_text(options.text)
        found = {"open_s": time.monotonic() - began} | measure(examples)
    else:
        found = billion_pairs()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
