"""Names and formats of parallel corpora, their digests, and bad input."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from corpus_files import COMPRESS, MALFORMED, PAIRS, text_pair, write

from transformer_jax.config import DataConfig
from transformer_jax.text import files
from transformer_jax.text.corpus import Corpora, Corpus


@pytest.mark.parametrize("end", ["", *COMPRESS])
def test_every_format_gives_the_pairs(tmp_path: Path, end: str) -> None:
    rows = [json.dumps({"de": b, "id": 7, "en": a}) for a, b in PAIRS]
    tsv = "".join(f"{a}\t{b}\n" for a, b in PAIRS)
    assert list(Corpus(text_pair(tmp_path, PAIRS, end)).pairs()) == [*PAIRS[:3], ("b", "ü")]
    assert list(Corpus(write(tmp_path / f"x.tsv{end}", tsv)).pairs()) == PAIRS
    jsonl = write(tmp_path / f"x.jsonl{end}", "\n".join(rows))
    assert list(Corpus(jsonl, fields=("en", "de")).pairs()) == PAIRS


def test_a_line_feed_in_json_is_a_space(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '{"source": "a\\nb", "target": "\\ud83d\\ude00"}')
    assert list(Corpus(path).pairs()) == [("a b", "😀")]


BUILT_IN = {
    "grammar": "ba2cbed0b92cfaf6a9e658e5874015238519fd5e32b06a0f24f5c6a5a46e84b7",
    "recipes": "2de8a44d8b45ac3b05d306fca27ee4dd31a7cb021768bd131831a13b61d734d0",
}
"""SHA-256 of all pairs: results that were measured on a corpus hold for this one only."""


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_built_in_corpora_are_those_of_the_results(name: str) -> None:
    splits = [Corpus(name, split) for split in ("train", "validation", "test")]
    pairs = [pair for split in splits for pair in split.pairs()]
    text = "".join(f"{source}\t{target}\n" for source, target in pairs)
    assert hashlib.sha256(text.encode()).hexdigest() == BUILT_IN[name]
    assert len({source for source, _ in pairs}) == len(pairs)
    own = "".join(f"{source}\t{target}\n" for source, target in splits[2].pairs())
    assert splits[2].digest == hashlib.sha256(own.encode()).hexdigest()
    assert list(Corpus(f"{name}:test").pairs()) == list(splits[2].pairs())


def test_an_unknown_split_is_one_line_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"^grammar:dev: split 'dev': must be one of .*test_new"):
        next(Corpus("grammar:dev").pairs())


def test_the_digest_is_of_the_text(tmp_path: Path) -> None:
    plain = text_pair(tmp_path, PAIRS)
    compressed = {Corpus(text_pair(tmp_path, PAIRS, end)).digest for end in COMPRESS}
    assert compressed == {Corpus(plain).digest}
    assert re.fullmatch("[0-9a-f]{64}", Corpus(plain).digest)
    assert Corpus(",".join(plain.split(",")[::-1])).digest != Corpus(plain).digest
    different = [[("a", "b")], [("a", "c")], [("c", "b")], [("a\na", "b")], [("a", "a\nb")]]
    assert len({Corpus(text_pair(tmp_path, pairs)).digest for pairs in different}) == 5


def test_digests_are_those_that_runs_have_stored(tmp_path: Path) -> None:
    plain, tsv = text_pair(tmp_path, PAIRS), write(tmp_path / "x.tsv", "a\tb\n")
    stored = "d418e8ba", "374f539f"
    assert tuple(Corpus(name).digest[:8] for name in (plain, tsv)) == stored


def test_the_corpora_of_a_config() -> None:
    config = DataConfig(train=("grammar", "grammar:test"), dev=("grammar",), fields=("a", "b"))
    corpora = Corpora.of(config)
    splits = "grammar:train", "grammar:test", "grammar:validation"
    every = [*corpora.train, *corpora.dev]
    assert [corpus.digest for corpus in every] == [Corpus(split).digest for split in splits]
    assert {corpus.fields for corpus in corpora.train + corpora.dev} == {("a", "b")}
    assert corpora.digests() == {
        "train": {"grammar": corpora.train[0].digest, "grammar:test": corpora.train[1].digest},
        "dev": {"grammar": corpora.dev[0].digest},
    }


@pytest.mark.parametrize("name", MALFORMED)
def test_bad_input_is_one_clear_line(tmp_path: Path, name: str) -> None:
    content, said = MALFORMED[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        list(Corpus(str(tmp_path / name)).pairs())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("longer", [0, 1])
def test_unequal_line_counts_are_both_named(tmp_path: Path, longer: int) -> None:
    names = [write(tmp_path / "a.en", "x\n" * 2), write(tmp_path / "a.de", "x\n" * 2)]
    write(Path(names[longer]), "x\n" * 5)
    counts = (5, 2) if longer == 0 else (2, 5)
    said = rf"a\.en has {counts[0]} lines and \S*a\.de has {counts[1]}: parallel files must"
    pairs = Corpus(",".join(names)).pairs()
    assert [next(pairs), next(pairs)] == [("x", "x")] * 2
    with pytest.raises(ValueError, match=said):
        next(pairs)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder.tsv").mkdir()
    with pytest.raises(ValueError, match=r"folder\.tsv: Is a directory; must be a readable file"):
        list(Corpus(str(tmp_path / "folder.tsv")).pairs())


# Commas in file names


def test_an_existing_file_with_a_comma_is_one_file(tmp_path: Path) -> None:
    tsv = write(tmp_path / "a,b.tsv", "x\ty\n")
    assert list(Corpus(tsv).pairs()) == [("x", "y")]
    jsonl = write(tmp_path / "a,b,c.jsonl", '{"source": "x", "target": "y"}')
    assert list(Corpus(jsonl).pairs()) == [("x", "y")]


def test_text_files_are_split_at_the_comma_where_both_exist(tmp_path: Path) -> None:
    source, target = write(tmp_path / "a,1.en", "x\n"), write(tmp_path / "a,1.de", "y\n")
    assert list(Corpus(f"{source},{target}").pairs()) == [("x", "y")]
    write(tmp_path / "a", "x\n")
    assert list(Corpus(f"{source},{target}").pairs()) == [("x", "y")]


def test_other_commas_are_errors(here: Path) -> None:
    with pytest.raises(ValueError, match=r"^corpus 'a,b\.tsv': no such file, and 0 of"):
        list(Corpus("a,b.tsv").pairs())
    with pytest.raises(ValueError, match=r"^corpus 'a,b,c': no such file, and 0 of its 2 commas"):
        list(Corpus("a,b,c").pairs())
    for name in ("a", "b,c", "a,b", "c"):
        write(here / name, "x\n")
    with pytest.raises(ValueError, match=r"^corpus 'a,b,c': no such file, and 2 of its 2 commas"):
        list(Corpus("a,b,c").pairs())
    with pytest.raises(ValueError, match=r"^missing: No such file or directory"):
        list(Corpus("a,missing").pairs())
    with pytest.raises(ValueError, match=r"No such file|name too long"):
        list(Corpus("a" * 200 + "," + "b" * 200).pairs())


# What can be read only once


@contextmanager
def piped(*texts: str) -> Iterator[str]:
    """Yields a corpus of pipes that hold these texts, such as /dev/fd/63,/dev/fd/62."""
    ends = []
    for text in texts:
        reading, writing = os.pipe()
        os.write(writing, text.encode())
        os.close(writing)
        ends.append(reading)
    yield ",".join(f"/dev/fd/{end}" for end in ends)
    files._copies.clear()
    for end in ends:
        os.close(end)


def test_a_pipe_is_read_once_for_all(tmp_path: Path) -> None:
    same = text_pair(tmp_path, [("a", "x"), ("b", "y")])
    with piped("a\nb\n", "x\ny\n") as name:
        for _ in range(2):
            assert Corpus(name).digest == Corpus(same).digest
            assert list(Corpus(name).pairs()) == [("a", "x"), ("b", "y")]
    with piped("a\nb\n", "x\n") as name, pytest.raises(ValueError, match="has 2 lines and /dev/fd"):
        list(Corpus(name).pairs())


def test_a_pipe_of_another_kind_is_named() -> None:
    with piped("a\n", "SQLite format 3\0") as name, pytest.raises(ValueError, match="is a SQLite"):
        list(Corpus(name).pairs())


def test_standard_input_may_be_a_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write(tmp_path / "x.de", "x\n")
    with Path(write(tmp_path / "x.en", "a\n")).open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        corpus = Corpus(f"-,{target}")
        assert corpus.digest == Corpus(f"{tmp_path / 'x.en'},{target}").digest
        assert list(corpus.pairs()) == [("a", "x")]
    files._copies.clear()
