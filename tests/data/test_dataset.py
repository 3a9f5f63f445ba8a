"""Ids, filters, subword sampling, and the cache of tokenized corpora."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import Patch
from corpus_files import MALFORMED, PAIRS, small_tokenizers, text_pair, write

from transformer_jax.config import Config, TokenizerConfig
from transformer_jax.data import dataset, entry
from transformer_jax.data.dataset import Examples, Report
from transformer_jax.data.order import Drawn
from transformer_jax.data.ragged import Ragged
from transformer_jax.special_ids import EOS
from transformer_jax.text import tokenizer
from transformer_jax.text.corpus import Corpus
from transformer_jax.text.tokenizer import Tokenizer


def tokenize(folder: Path, *corpora: str, **changes: Any) -> Examples:
    """`dataset.tokenize` for training, with a cache in `folder`."""
    options = {"max_length": 30, "max_ratio": 9.0, "filters": True, "process_index": 0} | changes
    data = {"cache": str(folder / "cache"), "max_ratio": options.pop("max_ratio")}
    config = Config().changed(data=data, model={"max_length": options.pop("max_length")})
    return dataset.tokenize([*map(Corpus, corpora)], small_tokenizers(), config, **options)


def ids(examples: Examples) -> list[tuple[list[int], list[int]]]:
    pairs = [examples.pair(i) for i in range(len(examples))]
    return [(source.tolist(), target.tolist()) for source, target in pairs]


def encoded(pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    encode = small_tokenizers().source.encode
    return [([*encode(source), EOS], [*encode(target), EOS]) for source, target in pairs]


# Ids


@pytest.mark.parametrize("name", ["missing.tsv", "tabs.tsv", "cut.tsv.gz"])
def test_bad_input_leaves_nothing_in_the_cache(tmp_path: Path, name: str) -> None:
    content, said = MALFORMED[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        tokenize(tmp_path, str(tmp_path / name))
    assert not list(tmp_path.glob("cache/*"))


def test_ids_are_those_of_the_tokenizer(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(dataset, "_CHUNK", 3)
    pairs = [(f"{i} dogs", f"the {i}") for i in range(8)]
    first = text_pair(tmp_path, pairs)
    second = write(tmp_path / "more.tsv", "x\ty\n")
    examples = tokenize(tmp_path, first, second)
    wanted = encoded([*pairs, ("x", "y")])
    assert ids(examples) == wanted
    assert examples.report == Report(9, 0, 0, 0)
    lengths = [[len(source), len(target)] for source, target in wanted]
    assert examples.lengths_of(np.arange(9)).tolist() == lengths
    assert examples.lengths.longest().tolist() == np.max(lengths, axis=0).tolist()
    assert examples.lengths.counts.tolist() == np.bincount(np.max(lengths, axis=1)).tolist()
    assert examples.sizes == (8, 1)
    assert ids(examples.take(np.array([8, 0, 8]))) == [wanted[8], wanted[0], wanted[8]]


def test_filters_count_every_pair_they_leave_out(tmp_path: Path) -> None:
    six = "q" * 5  # spelt in 6 tokens
    pairs = [("a", "b"), ("", "b"), ("a", " "), (six, "b"), ("q" * 29, six), ("q" * 30, "b")]
    pairs.append(("", "q" * 40))
    name = text_pair(tmp_path, pairs)
    lengths = [len(source) for source, _ in encoded(pairs)]
    assert lengths[3:6] == [7, 31, 32]

    trained = tokenize(tmp_path, name, max_length=31, max_ratio=2.0)
    assert ids(trained) == encoded([pairs[0]])
    assert trained.report == Report(kept=1, empty=3, too_long=1, length_ratio=2)
    said = "1 pairs; left out: 3 with an empty side, 1 too long, 2 by length ratio"
    assert str(trained.report) == said
    wide = tokenize(tmp_path, name, max_length=32, max_ratio=31 / 7)
    assert wide.report == Report(kept=3, empty=3, too_long=0, length_ratio=1)

    dev = tokenize(tmp_path, name, max_length=31, filters=False)
    assert ids(dev) == encoded([pairs[0], *pairs[2:5]])  # those with a source
    assert dev.report == Report(kept=4, empty=2, too_long=1, length_ratio=0)

    with pytest.raises(ValueError, match=r"no pair is left: 0 pairs; left out: 3 with an empty"):
        tokenize(tmp_path, name, max_length=2)


def test_a_sample_beyond_the_limits_is_the_pair_itself(tmp_path: Path) -> None:
    pairs = [(f"the {i} dogs of number", "rebmun fo") for i in range(40)]
    examples = tokenize(tmp_path, text_pair(tmp_path, pairs))
    drawn = Drawn(np.arange(40), np.zeros(40, int))
    every = ids(examples.sample(drawn, 0.5, 0, np.array([99, 99])))
    for side in (0, 1):
        limits = np.array([99, 99])
        limits[side] = int(np.median([len(pair[side]) for pair in every]))
        limited = ids(examples.sample(drawn, 0.5, 0, limits))
        both = zip(every, ids(examples), strict=True)
        wanted = [new if len(new[side]) <= limits[side] else old for new, old in both]
        assert limited == wanted
        assert every != wanted


def test_ragged_rows() -> None:
    rows = [[1, 2, 3], [], [4], [5, 6]]
    ragged = Ragged.of(rows)
    assert [ragged.row(i).tolist() for i in range(4)] == rows
    assert ragged.lengths().tolist() == [3, 0, 1, 2]
    for chosen in (np.array([3, 0, 3, 1]), np.array([False, True, True, False]), np.zeros(0, int)):
        taken = ragged.take(chosen)
        wanted = [rows[i] for i in np.arange(4)[chosen]]
        assert [taken.row(i).tolist() for i in range(len(wanted))] == wanted
        assert taken.ids.tolist() == [i for row in wanted for i in row]


# Cache


@contextmanager
def no_encoding(monkeypatch: Patch) -> Iterator[None]:
    """Any use of the tokenizer fails."""

    def fail(*_: object) -> None:
        raise AssertionError("tokenized again")

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode_all", fail)
        yield


def test_text_is_tokenized_once(tmp_path: Path, monkeypatch: Patch) -> None:
    name = text_pair(tmp_path, PAIRS[::3])
    first = tokenize(tmp_path, name)
    with no_encoding(monkeypatch):
        again = tokenize(tmp_path, name)
        packed = tokenize(tmp_path, text_pair(tmp_path, PAIRS[::3], ".gz"))
    assert ids(again) == ids(packed) == ids(first) == encoded([PAIRS[0], ("b", "ü")])
    assert again.report == first.report
    assert len(list(tmp_path.glob("cache/*"))) == 1


def test_other_text_or_options_are_other_entries(tmp_path: Path, monkeypatch: Patch) -> None:
    pairs = PAIRS[::3]
    name = text_pair(tmp_path, pairs)
    tokenize(tmp_path, name)
    calls = [
        lambda: tokenize(tmp_path, name, max_length=29),
        lambda: tokenize(tmp_path, name, max_ratio=8.0),
        lambda: tokenize(tmp_path, name, filters=False),
    ]
    for call in calls:
        with no_encoding(monkeypatch), pytest.raises(AssertionError, match="tokenized again"):
            call()
    for count, call in enumerate(calls, 2):
        call()
        assert len(list(tmp_path.glob("cache/*"))) == count
    text_pair(tmp_path, [*pairs, ("c", "c")])
    assert len(tokenize(tmp_path, name)) == 3
    apart = tokenizer.train([("abc", "cdc")] * 9, TokenizerConfig(vocabulary=264, joint=False))
    config = Config().changed(data={"cache": str(tmp_path / "cache")}, model={"max_length": 30})
    other = dataset.tokenize([Corpus(name)], apart, config, filters=True)
    assert ids(other)[2] == ([*apart.source.encode("c"), EOS], [*apart.target.encode("c"), EOS])


def test_another_corpus_is_tokenized_alone(tmp_path: Path, monkeypatch: Patch) -> None:
    dogs = [(f"{i} dogs", "x" * i) for i in range(1, 8)]
    first, second = text_pair(tmp_path, PAIRS), write(tmp_path / "a.tsv", "a\tb\nc\td\n")
    third = write(tmp_path / "b.tsv", "".join(f"{a}\t{b}\n" for a, b in dogs))
    tokenize(tmp_path, first, second, filters=False)
    read: list[str] = []
    pairs = Corpus.pairs
    monkeypatch.setattr(Corpus, "pairs", lambda self: read.append(self.name) or pairs(self))
    mixed = tokenize(tmp_path, third, first, second, first, filters=False)
    assert read == [third]
    apart = [tokenize(tmp_path, name, filters=False) for name in (third, first, second, first)]
    assert mixed.sizes == tuple(map(len, apart)) == (7, 3, 2, 3)
    assert ids(mixed) == [pair for each in apart for pair in ids(each)]
    assert mixed.report.kept == len(mixed) == 15
    chosen = np.array([14, 0, 7, 7, 12, 3])
    assert ids(mixed.take(chosen)) == [ids(mixed)[i] for i in chosen]
    lengths = [[len(side) for side in pair] for pair in ids(mixed)]
    assert mixed.lengths_of(chosen).tolist() == [lengths[i] for i in chosen]
    assert mixed.lengths.counts.tolist() == np.bincount(np.max(lengths, axis=1)).tolist()
    assert mixed.lengths.longest().tolist() == np.max(lengths, axis=0).tolist()


def test_the_cache_is_in_the_users_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    corpus = Corpus(text_pair(tmp_path, PAIRS))
    dataset.tokenize([corpus], small_tokenizers(), Config(), filters=True)
    assert len([*tmp_path.glob("transformer_jax/corpora/*/report.json")]) == 1


@pytest.mark.parametrize("file", ["source.ids", "target.offsets", "report.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_entry_is_replaced(tmp_path: Path, file: str, damage: str) -> None:
    name = text_pair(tmp_path, PAIRS)
    wanted = ids(tokenize(tmp_path, name))
    path = next(tmp_path.glob("cache/*")) / file
    raw = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(raw[:-4])
    assert ids(tokenize(tmp_path, name)) == wanted
    assert path.read_bytes() == raw
    assert len(list(tmp_path.glob("cache/*"))) == 1


def wait_for_process_0(folder: Path, name: str) -> tuple[threading.Thread, list[Examples]]:
    """Returns a thread that waits as another process does, and what it will have in the end."""
    found: list[Examples] = []
    waiting = threading.Thread(target=lambda: found.append(tokenize(folder, name, process_index=1)))
    waiting.start()
    return waiting, found


def test_other_processes_wait_for_process_0(tmp_path: Path, monkeypatch: Patch) -> None:
    name = text_pair(tmp_path, PAIRS)
    with monkeypatch.context() as patch:
        encode_all = Tokenizer.encode_all

        def encode(self: Tokenizer, texts: Any, threads: int = 1) -> Any:
            assert threading.current_thread() is threading.main_thread()
            return encode_all(self, texts, threads)

        patch.setattr(Tokenizer, "encode_all", encode)
        waiting, examples = wait_for_process_0(tmp_path, name)
        time.sleep(0.1)
        assert not examples
        wanted = ids(tokenize(tmp_path, name))
        waiting.join(20)
    assert ids(examples[0]) == wanted
    assert ids(tokenize(tmp_path, name, process_index=1)) == wanted


def test_waiting_ends_when_process_0_writes_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(dataset, "_PATIENCE", 0.3)
    with pytest.raises(ValueError, match=r"data\.cache=\S*cache: process 0 has written nothing"):
        tokenize(tmp_path, text_pair(tmp_path, PAIRS), process_index=1)


def test_waiting_goes_on_while_process_0_writes(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(dataset, "_PATIENCE", 0.8)
    name = text_pair(tmp_path, PAIRS)
    tokenize(tmp_path / "elsewhere", name)
    entry_name = next(tmp_path.glob("elsewhere/cache/*")).name
    writing = tmp_path / "cache" / f"{entry_name}.x"
    writing.mkdir(parents=True)
    waiting, examples = wait_for_process_0(tmp_path, name)
    for _ in range(8):
        (writing / "source.ids").touch()
        time.sleep(0.2)
    assert waiting.is_alive()
    tokenize(tmp_path, name)
    waiting.join(20)
    assert len(examples[0]) == 3


def test_two_runs_may_build_the_same_entry(tmp_path: Path, monkeypatch: Patch) -> None:
    name = text_pair(tmp_path, PAIRS)
    write_files = entry._write_files
    inner: list[Examples] = []
    inodes: list[int] = []

    def overtaken(folder: Path, fill: Any) -> Any:
        monkeypatch.setattr(entry, "_write_files", write_files)
        inner.append(tokenize(tmp_path, name))
        others = (path for path in tmp_path.glob("cache/*/report.json") if path.parent != folder)
        inodes.append(next(others).stat().st_ino)
        return write_files(folder, fill)

    monkeypatch.setattr(entry, "_write_files", overtaken)
    outer = tokenize(tmp_path, name)
    assert ids(outer) == ids(inner[0])
    left = list(tmp_path.glob("cache/*"))
    assert len(left) == 1
    assert (left[0] / "report.json").stat().st_ino == inodes[0]  # the first one stays


def test_no_space_is_one_line_and_older_entries_stay_whole(tmp_path: Path) -> None:
    older = text_pair(tmp_path, PAIRS)
    wanted = ids(tokenize(tmp_path, older))
    newer = write(tmp_path / "x.tsv", "the dogs\tof number\n" * 2000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(ValueError, match=r"data\.cache: .*cache; must be a folder") as caught:
            tokenize(tmp_path, newer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert len(list(tmp_path.glob("cache/*"))) == 1
    assert ids(tokenize(tmp_path, older)) == wanted
    assert len(tokenize(tmp_path, newer)) == 2000


def test_examples_are_memory_mapped(tmp_path: Path) -> None:
    examples = tokenize(tmp_path, text_pair(tmp_path, PAIRS))
    assert examples.source.ids.dtype == np.int32
    assert isinstance(getattr(examples.source.ids.base, "base", None), np.memmap)
    assert not examples.source.ids.flags.writeable
