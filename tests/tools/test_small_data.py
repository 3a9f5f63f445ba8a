"""The study of few pairs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tools import small_data
from transformer_jax.config import Config
from transformer_jax.text.corpus import Corpus, Pair


def test_the_curve_of_each_way_is_ordered_by_pairs() -> None:
    rows = {
        name: {"bleu_cased_13a": bleu}
        for name, bleu in (("recipe_29000", 3.0), ("recipe_3000", 1.0), ("back_3000", 2.0))
    }
    found = small_data.curves(rows)["panels"]["BLEU, cased, 13a"]
    assert found == {
        "the recipe": [(3_000, 1.0), (29_000, 3.0)],
        "back-translation": [(3_000, 2.0)],
    }


def test_the_reverse_run_sees_the_few_pairs_the_other_way_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs: list[Pair] = [(f"a {i}", f"ein {i}") for i in range(5)]
    (tmp_path / "val.en").write_text("one\n", "utf-8")
    (tmp_path / "val.de").write_text("eins\n", "utf-8")
    val = Corpus(f"{tmp_path / 'val.en'},{tmp_path / 'val.de'}")
    monkeypatch.setattr(small_data, "FOLDER", tmp_path)
    monkeypatch.setattr(small_data, "corpus", lambda data, split: val)
    data = small_data.reverse(Config(), tmp_path, pairs[:2]).data
    assert list(Corpus(data.train[0]).pairs()) == [("ein 0", "a 0"), ("ein 1", "a 1")]
    assert list(Corpus(data.dev[0]).pairs()) == [("eins", "one")]


def test_half_of_the_pairs_are_made_of_the_german_sides_that_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...], check: bool) -> None:
        commands.append(command)

    monkeypatch.setattr(small_data, "FOLDER", tmp_path)
    monkeypatch.setattr(small_data.subprocess, "run", run)
    pairs: list[Pair] = [(f"a {i}", f"ein {i}") for i in range(4)]
    few = replace(Config(), data=replace(Config().data, train=(f"{tmp_path}/3.tsv",)))
    data = small_data.with_back_translation(few, 3).data
    assert data.train == (f"{tmp_path}/3.tsv", f"{tmp_path}/3.back.tsv")
    assert data.weights == (1.0, 1.0)
    small_data.back_translate(3, pairs)
    assert (tmp_path / "3.rest.de").read_text("utf-8") == "ein 3\n"
    (command,) = commands
    assert {f"--run={tmp_path}/reverse_3", f"--pairs={tmp_path}/3.tsv"} < {*command}
    assert f"--output={data.train[1]}" in command
    Path(data.train[1]).touch()
    small_data.back_translate(3, pairs)
    assert len(commands) == 1  # what is there is not made again
