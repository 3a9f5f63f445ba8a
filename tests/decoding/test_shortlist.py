"""Searches among the candidates of each source, and Marian's files of these."""

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import error_line

from transformer_jax.decoding.translator import Hypothesis, Translator
from transformer_jax.interop.shortlist import Shortlist
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import EOS, UNK

LINES = ["red old", "blue new green", "", "old old red new", "green"]


@pytest.fixture(scope="module")
def translator(finished: Run) -> Translator:
    return Translator.load(finished.folder, decode=replace(finished.config.decode, beam=1))


def assert_same(found: Hypothesis, wanted: Hypothesis) -> None:
    assert found.ids == wanted.ids
    assert found.log_prob == pytest.approx(wanted.log_prob, abs=1e-4)


def test_all_candidates_are_no_shortlist(translator: Translator) -> None:
    everything = np.arange(translator.tokenizers.target.size, dtype=np.int32)
    plain = translator.with_search(replace(translator.config.decode, beam=3, n_best=2))
    outputs = zip(plain(LINES), plain.with_shortlist(lambda _: everything)(LINES), strict=True)
    for wanted, found in outputs:
        for hypotheses in zip(found.hypotheses, wanted.hypotheses, strict=True):
            assert_same(*hypotheses)


def test_outputs_consist_of_the_candidates_of_their_own_source(translator: Translator) -> None:
    size = translator.tokenizers.target.size

    def every_third(source: Sequence[int]) -> np.ndarray:
        return np.array([EOS, *range(UNK + 1 + source[0] % 3, size, 3)], np.int32)

    listed = translator.with_shortlist(every_third)
    together = [each.hypotheses[0] for each in listed(LINES)]
    for line, output in zip(LINES, together, strict=True):
        assert_same(listed(line).hypotheses[0], output)
        assert {*output.ids} <= {*every_third(translator.encode(line) or [0])}
    assert len({translator.encode(line)[0] % 3 for line in LINES if line}) > 1
    # Greedy search finds what it finds if all others are suppressed.
    others = [i for i in range(UNK, size) if i not in every_third(translator.encode(LINES[1]))]
    suppress = tuple(translator.tokenizers.target.pieces(others))
    suppressing = translator.with_search(replace(translator.config.decode, suppress=suppress))
    assert suppressing(LINES[1]).hypotheses[0].ids == together[1].ids


def test_what_a_caller_asks_for_is_a_candidate(translator: Translator) -> None:
    listed = translator.with_shortlist(lambda _: np.array([EOS], np.int32))
    assert next(listed.stream(["old red"], prefixes=["wen"])).text == "wen"
    beam = listed.with_search(replace(translator.config.decode, beam=8))
    assert "wen" in next(beam.stream(["old red"], phrases=[["wen"]])).text


def as_file(first: int, lists: Sequence[Sequence[int]]) -> bytes:
    """Returns Marian's `lex.bin` with a list of target ids for each source id."""
    offsets = np.cumsum([0, *map(len, lists)]).astype("<u8").tobytes()
    ids = np.concatenate([np.array(each, "<u4") for each in lists])
    body = struct.pack("<4Q", first, 2, len(lists) + 1, len(ids)) + offsets + ids.tobytes()
    checksum = 0
    for (word,) in struct.iter_unpack("<Q", body[: len(body) // 8 * 8]):
        checksum ^= (word + 0x9E3779B9 + (checksum << 6) + (checksum >> 2)) % 2**64
    return struct.pack("<2Q", 0xF11A48D5013417F5, checksum) + body


def test_candidates_of_a_file(translator: Translator, tmp_path: Path) -> None:
    size = translator.tokenizers.source.size
    lists: list[list[int]] = [[] for _ in range(size)]
    lists[7], lists[9] = [20, 30], [30, 40]
    (tmp_path / "lex.bin").write_bytes(as_file(6, lists))
    shortlist = Shortlist(str(tmp_path / "lex.bin"), translator.tokenizers)
    np.testing.assert_array_equal(shortlist([7, 9, EOS]), [0, 1, 2, 3, 4, 5, 20, 30, 40])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"text", "is no shortlist of Marian"),
        (lambda data: data[:-4], "it is cut or damaged"),
        (lambda data: data[:-1] + b"\1", "is damaged: its checksum"),
        (lambda _: as_file(6, [[1, 2]] * 100), "is of other vocabularies: it has lists of 100"),
        (lambda data: data[:32] + struct.pack("<Q", 10**12) + data[40:], "claims 1,000,000"),
    ],
)
def test_damaged_files_and_those_of_others(
    change: Any, message: str, translator: Translator, finished: Run, tmp_path: Path, capsys: Any
) -> None:
    path, output = tmp_path / "lex.bin", tmp_path / "output"
    path.write_bytes(change(as_file(6, [[1, 2]] * translator.tokenizers.source.size)))
    command = ["translate", f"--run={finished.folder}", f"--shortlist={path}"]
    line = error_line([*command, f"--output={output}"], capsys)
    assert f"{path}: " in line and message in line
    assert [*tmp_path.iterdir()] == [path]
