"""Formats, bad input, filters, and the cache of tokenised corpora."""

from __future__ import annotations

import gzip
import io
import json
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transformer_jax import corpus, grammar, tokenizer
from transformer_jax.config import DataConfig, TokenizerConfig
from transformer_jax.corpus import Examples, Ragged, Report
from transformer_jax.tokenizer import EOS, Tokenizer, Tokenizers

PAIRS = [
    ("A dog runs.", "Ein Hund läuft."),
    ("", "nichts"),
    ("x\u2028y", "\x0bz\x85"),
    ("b\r", "ü"),
]


def write(path: Path, data: str | bytes) -> str:
    """Writes a file, compressed if its name says so; returns its name."""
    raw = data.encode() if isinstance(data, str) else data
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return str(path)


def text_pair(folder: Path, pairs: Sequence[tuple[str, str]], end: str = "") -> str:
    """A corpus of two text files."""
    sides = zip(*pairs, strict=True)
    names = [
        write(folder / f"{name}{end}", "".join(f"{line}\n" for line in side))
        for name, side in zip(("source", "target"), sides, strict=True)
    ]
    return ",".join(names)


@cache
def tokenizers() -> Tokenizers:
    lines = [f"the {i % 7} dogs of number {i}" for i in range(300)]
    return tokenizer.train([(line, line[::-1]) for line in lines], TokenizerConfig(vocabulary=300))


def tokenise(folder: Path, *corpora: str, **changes: Any) -> Examples:
    """`corpus.tokenise` for training, with a cache in `folder`."""
    options = {"max_length": 30, "split": "train", "filters": True, "process_index": 0} | changes
    config = DataConfig(cache=str(folder / "cache"), max_ratio=options.pop("max_ratio", 9.0))
    return corpus.tokenise(corpora, tokenizers(), config, **options)


def ids(examples: Examples) -> list[tuple[list[int], list[int]]]:
    pairs = [examples.pair(i) for i in range(len(examples))]
    return [(source.tolist(), target.tolist()) for source, target in pairs]


def encoded(pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    encode = tokenizers().source.encode
    return [([*encode(source), EOS], [*encode(target), EOS]) for source, target in pairs]


# Reading


@pytest.mark.parametrize("end", ["", ".gz"])
def test_every_format_gives_the_pairs(tmp_path: Path, end: str) -> None:
    rows = [json.dumps({"de": b, "id": 7, "en": a}) for a, b in PAIRS]
    tsv = "".join(f"{a}\t{b}\n" for a, b in PAIRS)
    assert list(corpus.read_pairs(text_pair(tmp_path, PAIRS, end))) == [*PAIRS[:3], ("b", "ü")]
    assert list(corpus.read_pairs(write(tmp_path / f"x.tsv{end}", tsv))) == PAIRS
    jsonl = write(tmp_path / f"x.jsonl{end}", "\n".join(rows))
    assert list(corpus.read_pairs(jsonl, ("en", "de"))) == PAIRS


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    path = write(tmp_path / "x", "a\r\nb\u2028c\x0bd\x85e\r\r\n\nlast")
    assert list(corpus.read_lines(path)) == ["a", "b\u2028c\x0bd\x85e\r", "", "last"]


def test_a_line_feed_in_json_is_a_space(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '{"source": "a\\nb", "target": "\\ud83d\\ude00"}')
    assert list(corpus.read_pairs(path)) == [("a b", "😀")]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("ä\nb".encode())))
    assert list(corpus.read_lines("-")) == ["ä", "b"]


def test_the_grammar_and_its_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "load", lambda split: [grammar.Pair(split, "ö")])
    assert list(corpus.read_pairs("grammar")) == [("train", "ö")]
    assert list(corpus.read_pairs("grammar", split="validation")) == [("validation", "ö")]
    assert list(corpus.read_pairs("grammar:test_new", split="train")) == [("test_new", "ö")]
    assert corpus.digest("grammar", "test") == corpus.digest("grammar:test")
    assert corpus.digest("grammar", "test") != corpus.digest("grammar", "validation")


def test_the_digest_is_of_the_text(tmp_path: Path) -> None:
    plain, packed = text_pair(tmp_path, PAIRS), text_pair(tmp_path, PAIRS, ".gz")
    assert corpus.digest(plain) == corpus.digest(packed)
    assert re.fullmatch("[0-9a-f]{64}", corpus.digest(plain))
    assert corpus.digest(",".join(plain.split(",")[::-1])) != corpus.digest(plain)
    different = [[("a", "b")], [("a", "c")], [("c", "b")], [("a\na", "b")], [("a", "a\nb")]]
    assert len({corpus.digest(text_pair(tmp_path, pairs)) for pairs in different}) == 5


GZIP = gzip.compress(b"a\tb\n" * 99)
BAD = {
    "neither.txt": (b"", r"corpus '\S*neither.txt': must be grammar, .*FILE\.tsv or FILE\.jsonl"),
    "missing.tsv": (None, r"missing\.tsv: No such file or directory; must be a readable file"),
    "none.tsv": (b"", r"none\.tsv: empty; must hold at least one pair"),
    "tabs.tsv": (b"a\tb\nc\n", r"tabs\.tsv: line 2: 0 tabs; must be SOURCE, tab, TARGET"),
    "more.tsv": (b"a\tb\tc\n", r"more\.tsv: line 1: 2 tabs; must be SOURCE, tab, TARGET"),
    "byte.tsv": (b"a\tb\nabc\xffd\te", r"byte\.tsv: line 2, byte 4: 0xff is not UTF-8; must be"),
    "cut.tsv.gz": (GZIP[:-9], r"cut\.tsv\.gz: damaged gzip file"),
    "flip.tsv.gz": (GZIP[:15] + b"\0" + GZIP[16:], r"flip\.tsv\.gz: damaged gzip file"),
    "not.tsv.gz": (b"a\tb", r"not\.tsv\.gz: damaged gzip file"),
    "bad.jsonl": (b'{"source": "a", "target": "b"}\n{', r"bad\.jsonl: line 2: not JSON \("),
    "key.jsonl": (b'{"source": "a"}', r"key\.jsonl: line 1: must be an object with .*'target'"),
    "list.jsonl": (b'["source", "target"]', r"list\.jsonl: line 1: must be an object"),
    "type.jsonl": (b'{"source": 1, "target": "b"}', r"type\.jsonl: line 1: must be an object"),
    "lone.jsonl": (b'{"source": "\\ud800", "target": ""}', r"line 1: must be .*Unicode texts"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    content, said = BAD[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    for read in (lambda path: list(corpus.read_pairs(path)), lambda path: tokenise(tmp_path, path)):
        with pytest.raises(ValueError, match=said) as caught:
            read(str(tmp_path / name))
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("cache/*"))


@pytest.mark.parametrize("longer", [0, 1])
def test_unequal_line_counts_are_both_named(tmp_path: Path, longer: int) -> None:
    names = [write(tmp_path / "a.en", "x\n" * 2), write(tmp_path / "a.de", "x\n" * 2)]
    write(Path(names[longer]), "x\n" * 5)
    counts = (5, 2) if longer == 0 else (2, 5)
    said = rf"a\.en has {counts[0]} lines and \S*a\.de has {counts[1]}: parallel files must"
    with pytest.raises(ValueError, match=said):
        tokenise(tmp_path, ",".join(names))
    assert not list(tmp_path.glob("cache/*"))
    pairs = corpus.read_pairs(",".join(names))
    assert [next(pairs), next(pairs)] == [("x", "x")] * 2
    with pytest.raises(ValueError, match=said):
        next(pairs)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder.tsv").mkdir()
    with pytest.raises(ValueError, match=r"folder\.tsv: Is a directory; must be a readable file"):
        list(corpus.read_pairs(str(tmp_path / "folder.tsv")))


# Ids


def test_ids_are_those_of_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_CHUNK", 3)
    pairs = [(f"{i} dogs", f"the {i}") for i in range(8)]
    first = text_pair(tmp_path, pairs)
    second = write(tmp_path / "more.tsv", "x\ty\n")
    examples = tokenise(tmp_path, first, second)
    wanted = encoded([*pairs, ("x", "y")])
    assert ids(examples) == wanted
    assert examples.report == Report(9, 0, 0, 0)
    assert examples.lengths.tolist() == [[len(source), len(target)] for source, target in wanted]
    assert ids(examples.take(np.array([8, 0, 8]))) == [wanted[8], wanted[0], wanted[8]]


def test_filters_count_every_pair_they_leave_out(tmp_path: Path) -> None:
    six = "q" * 5  # spelt in 6 tokens
    pairs = [("a", "b"), ("", "b"), ("a", " "), (six, "b"), ("q" * 29, six), ("q" * 30, "b")]
    pairs.append(("", "q" * 40))
    name = text_pair(tmp_path, pairs)
    lengths = [len(source) for source, _ in encoded(pairs)]
    assert lengths[3:6] == [7, 31, 32]

    trained = tokenise(tmp_path, name, max_length=31, max_ratio=2.0)
    assert ids(trained) == encoded([pairs[0]])
    assert trained.report == Report(kept=1, empty=3, over_long=1, ratio=2)
    assert str(trained.report) == (
        "1 pairs; left out: 3 with an empty side, 1 over-long, 2 of unlike lengths"
    )
    wide = tokenise(tmp_path, name, max_length=32, max_ratio=31 / 7)
    assert wide.report == Report(kept=3, empty=3, over_long=0, ratio=1)

    dev = tokenise(tmp_path, name, max_length=31, filters=False)
    assert ids(dev) == encoded(pairs[:5])
    assert dev.report == Report(kept=5, empty=0, over_long=2, ratio=0)

    with pytest.raises(ValueError, match=r"no pair is left: 0 pairs; left out: 3 with an empty"):
        tokenise(tmp_path, name, max_length=2)


def test_sampled_subwords_are_a_function_of_seed_epoch_and_pair(tmp_path: Path) -> None:
    pairs = [(f"the {i} dogs of number", f"rebmun fo {i}") for i in range(40)]
    examples = tokenise(tmp_path, text_pair(tmp_path, pairs))
    far = np.array([99, 99])

    def sample(rows: Sequence[int], seed: int = 0, epoch: int = 0) -> list[Any]:
        return ids(examples.sample(np.array(rows), 0.5, seed, epoch, far))

    every = sample(range(40))
    assert sample([7, 3, 39]) == [every[7], every[3], every[39]]
    for other in (sample(range(40), seed=1), sample(range(40), epoch=1), ids(examples)):
        assert sum(a != b for a, b in zip(other, every, strict=True)) > 30
    decode = tokenizers().source.decode
    assert [(decode(source), decode(target)) for source, target in every] == pairs
    assert all(side[-1] == EOS and side.count(EOS) == 1 for pair in every for side in pair)


def test_a_sample_beyond_the_limits_is_the_pair_itself(tmp_path: Path) -> None:
    pairs = [(f"the {i} dogs of number", "rebmun fo") for i in range(40)]
    examples = tokenise(tmp_path, text_pair(tmp_path, pairs))
    every = ids(examples.sample(np.arange(40), 0.5, 0, 0, np.array([99, 99])))
    for side in (0, 1):
        limits = np.array([99, 99])
        limits[side] = int(np.median([len(pair[side]) for pair in every]))
        limited = ids(examples.sample(np.arange(40), 0.5, 0, 0, limits))
        wanted = [
            new if len(new[side]) <= limits[side] else old
            for new, old in zip(every, ids(examples), strict=True)
        ]
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
def no_encoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any use of the tokenizer fails."""

    def fail(*_: object) -> None:
        raise AssertionError("tokenised again")

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode_all", fail)
        yield


def test_text_is_tokenised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = text_pair(tmp_path, PAIRS[::3])
    made = tokenise(tmp_path, name)
    with no_encoding(monkeypatch):
        found = tokenise(tmp_path, name)
        packed = tokenise(tmp_path, text_pair(tmp_path, PAIRS[::3], ".gz"))
    assert ids(found) == ids(packed) == ids(made) == encoded([PAIRS[0], ("b", "ü")])
    assert found.report == made.report
    assert len(list(tmp_path.glob("cache/*"))) == 1


def test_other_text_tokenizer_or_options_are_other_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = PAIRS[::3]
    name = text_pair(tmp_path, pairs)
    tokenise(tmp_path, name)
    calls = [
        lambda: tokenise(tmp_path, name, name),
        lambda: tokenise(tmp_path, name, max_length=29),
        lambda: tokenise(tmp_path, name, max_ratio=8.0),
        lambda: tokenise(tmp_path, name, filters=False),
    ]
    for call in calls:
        with no_encoding(monkeypatch), pytest.raises(AssertionError, match="tokenised again"):
            call()
    for count, call in enumerate(calls, 2):
        call()
        assert len(list(tmp_path.glob("cache/*"))) == count
    text_pair(tmp_path, [*pairs, ("c", "c")])
    assert len(tokenise(tmp_path, name)) == 3
    apart = tokenizer.train([("abc", "cdc")] * 9, TokenizerConfig(vocabulary=264, joint=False))
    config = DataConfig(cache=str(tmp_path / "cache"))
    other = corpus.tokenise([name], apart, config, max_length=30, split="train", filters=True)
    assert ids(other)[2] == ([*apart.source.encode("c"), EOS], [*apart.target.encode("c"), EOS])


def test_the_cache_is_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = text_pair(tmp_path, PAIRS)

    def made() -> list[str]:
        corpus.tokenise(
            [name], tokenizers(), DataConfig(), max_length=30, split="train", filters=True
        )
        return [
            path.parent.name for path in tmp_path.rglob("transformer_jax/corpora/*/report.json")
        ]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert len(made()) == 1
    assert len(list((tmp_path / "xdg" / "transformer_jax" / "corpora").iterdir())) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert len(made()) == 2
    assert len(list((tmp_path / "home/.cache/transformer_jax/corpora").iterdir())) == 1


@pytest.mark.parametrize("file", ["source.ids", "target.offsets", "report.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_entry_is_made_anew(tmp_path: Path, file: str, damage: str) -> None:
    name = text_pair(tmp_path, PAIRS)
    wanted = ids(tokenise(tmp_path, name))
    path = next(tmp_path.glob("cache/*")) / file
    raw = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(raw[:-4] if damage == "cut" else bytes([raw[0] ^ 1]) + raw[1:])
    assert ids(tokenise(tmp_path, name)) == wanted
    assert path.read_bytes() == raw
    assert len(list(tmp_path.glob("cache/*"))) == 1


def test_other_processes_wait_for_process_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = text_pair(tmp_path, PAIRS)
    found: list[Examples] = []
    with monkeypatch.context() as patch:
        encode_all = Tokenizer.encode_all

        def encode(self: Tokenizer, texts: Any, threads: int = 1) -> Any:
            assert threading.current_thread() is threading.main_thread()
            return encode_all(self, texts, threads)

        patch.setattr(Tokenizer, "encode_all", encode)
        waiting = threading.Thread(
            target=lambda: found.append(tokenise(tmp_path, name, process_index=1))
        )
        waiting.start()
        time.sleep(0.1)
        assert not found
        made = tokenise(tmp_path, name)
        waiting.join(20)
    assert ids(found[0]) == ids(made)
    assert ids(tokenise(tmp_path, name, process_index=1)) == ids(made)


def test_waiting_ends_when_process_0_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_PATIENCE", 0.3)
    with pytest.raises(ValueError, match=r"data\.cache=\S*cache: process 0 has written nothing"):
        tokenise(tmp_path, text_pair(tmp_path, PAIRS), process_index=1)


def test_waiting_goes_on_while_process_0_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_PATIENCE", 0.8)
    name = text_pair(tmp_path, PAIRS)
    tokenise(tmp_path / "elsewhere", name)
    entry = next(tmp_path.glob("elsewhere/cache/*")).name
    writing = tmp_path / "cache" / f"{entry}.x"
    writing.mkdir(parents=True)
    found: list[Examples] = []
    waiting = threading.Thread(
        target=lambda: found.append(tokenise(tmp_path, name, process_index=1))
    )
    waiting.start()
    for _ in range(8):
        (writing / "source.ids").touch()
        time.sleep(0.2)
    assert waiting.is_alive()
    tokenise(tmp_path, name)
    waiting.join(20)
    assert len(found[0]) == 3


def test_two_runs_may_build_the_same_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = text_pair(tmp_path, PAIRS)
    write_files = corpus._write_files
    inner: list[Examples] = []

    def overtaken(folder: Path, chunks: Any) -> Report:
        monkeypatch.setattr(corpus, "_write_files", write_files)
        inner.append(tokenise(tmp_path, name))
        inode = next(tmp_path.glob("cache/*/report.json")).stat().st_ino
        report = write_files(folder, chunks)
        inodes.append(inode)
        return report

    inodes: list[int] = []
    monkeypatch.setattr(corpus, "_write_files", overtaken)
    outer = tokenise(tmp_path, name)
    assert ids(outer) == ids(inner[0])
    left = list(tmp_path.glob("cache/*"))
    assert len(left) == 1
    assert (left[0] / "report.json").stat().st_ino == inodes[0]  # the first one stays


def test_no_space_is_one_line_and_older_entries_stay_whole(tmp_path: Path) -> None:
    older = text_pair(tmp_path, PAIRS)
    wanted = ids(tokenise(tmp_path, older))
    newer = write(tmp_path / "x.tsv", "the dogs\tof number\n" * 2000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(ValueError, match=r"data\.cache: .*cache; must be a folder") as caught:
            tokenise(tmp_path, newer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert len(list(tmp_path.glob("cache/*"))) == 1
    assert ids(tokenise(tmp_path, older)) == wanted
    assert len(tokenise(tmp_path, newer)) == 2000


def test_a_cache_that_is_no_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path / "cache", "a file")
    with pytest.raises(ValueError, match=r"data\.cache: .* while writing to \S*cache; must be a"):
        tokenise(tmp_path, text_pair(tmp_path, PAIRS))


def test_examples_are_memory_mapped(tmp_path: Path) -> None:
    examples = tokenise(tmp_path, text_pair(tmp_path, PAIRS))
    assert examples.source.ids.dtype == np.int32
    assert isinstance(examples.source.ids.base, np.memmap)
    assert not examples.source.ids.flags.writeable


MULTI30K = Path(__file__).parents[2] / "shared" / "data" / "multi30k"


@pytest.mark.skipif(not MULTI30K.exists(), reason="needs shared/data/multi30k beside the project")
def test_text_comes_back_from_ids_of_multi30k(tmp_path: Path) -> None:
    name = f"{MULTI30K}/val.en.gz,{MULTI30K}/val.de.gz"
    made = tokenizer.train(corpus.read_pairs(name), TokenizerConfig(vocabulary=2000))
    config = DataConfig(cache=str(tmp_path))
    examples = corpus.tokenise([name], made, config, max_length=256, split="train", filters=True)
    assert examples.report == Report(1014, 0, 0, 0)
    for (source, _), (line, _) in zip(ids(examples), corpus.read_pairs(name), strict=True):
        assert made.source.decode(source) == made.source.normalize(line)
        assert made.source.encode(made.source.decode(source)) == source[:-1]


def test_nothing_here_imports_jax() -> None:
    code = "import sys, transformer_jax.corpus; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
