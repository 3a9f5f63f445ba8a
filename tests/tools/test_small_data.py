"""The study of few pairs."""

from __future__ import annotations

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
