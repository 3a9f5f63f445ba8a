"""Measures what saving adds to a step, and the loader on corpora of up to a billion pairs.

    python -m tools.costs

Writes results/costs.json. The pairs of the largest corpora are computed from their index, so they
need no disk; those of the corpus on the disk are text, which is tokenized into the cache. Each
corpus is loaded in a process of its own.
"""

import itertools
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from jaxtyping import Int, Int32

from configs.quickstart import get_config
from tools.common import memory_mib
from transformer_jax.allocator import restart_with_allocator
from transformer_jax.benchmark import results
from transformer_jax.config import Config, DataConfig, TokenizerConfig
from transformer_jax.data.buckets import Lengths
from transformer_jax.data.dataset import Examples, Report, tokenize
from transformer_jax.data.loader import CHUNK, Loaded, Loader
from transformer_jax.data.ragged import Ragged
from transformer_jax.runs import manifest
from transformer_jax.text import tokenizer
from transformer_jax.text.corpus import Corpus
from transformer_jax.training.trainer import train

CONFIG = Config(data=DataConfig(shapes=4))
BATCHES = 200
VOCABULARY, LONGEST = 8000, 48
PRIMES = (7, 61, 547, 1279, 2011, 2399, 2801)


class Computed(Examples):
    """Pairs of 2 to `LONGEST` tokens on each side, whose ids are functions of their index."""

    def __len__(self) -> int:
        return self.report.kept

    @cached_property
    def lengths(self) -> Lengths:
        """Returns those of the first pairs, as samples of all."""
        return Lengths.of(self.lengths_of(np.arange(CHUNK)))

    def lengths_of(self, pairs: Int[np.ndarray, " Q"]) -> Int32[np.ndarray, "Q 2"]:
        """Returns lengths that are a hash of the index."""
        mixed = pairs.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        sides = [(mixed >> np.uint64(bits)) % np.uint64(LONGEST - 1) for bits in (40, 20)]
        return 2 + np.stack(sides, axis=1).astype(np.int32)

    def take(self, pairs: Int[np.ndarray, " Q"]) -> Examples:
        """Returns pairs in each of which an id that depends on the index is repeated."""
        ids = (4 + pairs % VOCABULARY).astype(np.int32)
        sides = self.lengths_of(pairs).T
        return self.with_ids(*(Ragged.of_lengths(np.repeat(ids, side), side) for side in sides))


def billion_pairs(computed: Sequence[int], on_disk: int, folder: Path) -> list[dict[str, Any]]:
    """Returns `measure` of corpora of these numbers of pairs; that on the disk is in `folder`."""
    path = folder / "pairs.tsv"
    write_text(path, on_disk)
    load_text(path)  # into the cache
    rows = []
    for corpus in (*computed, path):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            rows.append(pool.submit(measure, corpus).result())
    return rows


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
    first = itertools.islice(corpus.pairs(), 10_000)
    tokenizers = tokenizer.train(first, TokenizerConfig(vocabulary=2000))
    config = Config(data=DataConfig(cache=str(path.parent / "cache")))
    return tokenize([corpus], tokenizers, config, filters=True)


def compute(count: int) -> Examples:
    """Returns `count` computed pairs."""
    text = [("the small dog sees a house", "der kleine hund sieht ein haus")] * 9
    tokenizers = tokenizer.train(text, TokenizerConfig(vocabulary=300))
    return Computed(Ragged.of([]), Ragged.of([]), tokenizers, Report(count, 0, 0, 0))


def measure(corpus: int | Path) -> dict[str, Any]:
    """Returns what it takes to load batches from the start and from the middle of an epoch.

    - corpus: the number of computed pairs, or the file of the pairs on the disk.
    - peak_mib: how much this process's memory has grown at most, without the pages of files, which
      the system takes back when it needs them.
    - resumed: whether batches after a position are those of an epoch that went through it.
    """
    on_disk = isinstance(corpus, Path)
    examples = load_text(corpus) if on_disk else compute(corpus)
    before, stop, peaks = memory_mib("RssAnon"), threading.Event(), [0.0]

    def watch() -> None:
        while not stop.wait(0.002):
            peaks.append(memory_mib("RssAnon") - before)

    threading.Thread(target=watch, daemon=True).start()
    middle = Loader(examples, CONFIG).chunks // 2 << 20
    first_s, others_s, _ = load(examples, 0, 1 + BATCHES)
    *middle_s, whole = load(examples, middle, BATCHES)
    *_, again = load(examples, whole[9].after, BATCHES - 10)
    stop.set()
    return {
        "kind": "on the disk" if on_disk else "computed",
        "pairs": len(examples),
        "peak_mib": max(peaks),
        "first_batch_s": first_s,
        "batch_ms": others_s * 1e3 / BATCHES,
        "middle_s": sum(middle_s),
        "resumed": all(map(_same, whole[10:], again)),
    }


def load(examples: Examples, position: int, count: int) -> tuple[float, float, list[Loaded]]:
    """Returns the seconds that a new loader takes for the first batch from a position on, those for
    the others, and all of them."""
    began = time.monotonic()
    with closing(Loader(examples, CONFIG).batches(position)) as batches:
        loaded = [next(batches)]
        first = time.monotonic()
        loaded += itertools.islice(batches, count - 1)
    return first - began, time.monotonic() - first, loaded


def _same(one: Loaded, other: Loaded) -> bool:
    pairs = zip(one.batch[:3], other.batch[:3], strict=True)
    return one.after == other.after and all(np.array_equal(a, b) for a, b in pairs)


def save_stall(folder: Path, turns: int, steps: int = 12) -> dict[str, float]:
    """Trains the quickstart in turns of `steps` without a save and as many after one. Returns the
    median of what a save adds to the steps after it, in milliseconds, and the most that digests can
    add to that, as a share of it."""
    ends, digests = list[float](), list[float]()
    config = get_config().changed(
        data={"dev": (), "shapes": 1, "cache": str(folder / "cache")},
        train={"steps": 2 * steps * (turns + 1), "save_every": 2 * steps, "log_every": steps},
    )
    write = manifest.write

    def timed_write(*arguments: Any) -> None:
        began = time.perf_counter()
        write(*arguments)  # computes the digests
        digests.append(time.perf_counter() - began)

    def report(record: dict[str, Any]) -> None:
        if record["kind"] == "train":
            ends.append(time.perf_counter())

    with patch.object(manifest, "write", timed_write):
        train(config, folder / "run", reporters=[report])
    # A step is reported before it is saved: a save is in the second half of a turn.
    seconds = np.diff(ends)
    stall = float(np.median(seconds[1::2] - seconds[:-1:2]))
    return {"step_stall_ms": stall * 1e3, "digest_share_of_stall": float(np.mean(digests)) / stall}


def main() -> None:
    """Measures both and writes the result file."""
    with tempfile.TemporaryDirectory() as name:
        found: dict[str, Any] = save_stall(Path(name) / "stall", turns=9)
        found["billion_pairs"] = billion_pairs((10**6, 10**9), 10**7, Path(name) / "pairs")
    print(results.write("costs", "make measure NAME=costs", found))


if __name__ == "__main__":
    restart_with_allocator()
    main()
