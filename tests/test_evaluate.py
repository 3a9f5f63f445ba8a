"""Scores: the published ruler, signatures, and losses that add."""

from pathlib import Path

import pytest

from transformer_jax.corpus import read_lines
from transformer_jax.evaluate import corpus_loss, lower_tokenise, score

MULTI30K = Path(__file__).parents[2] / "shared" / "data" / "multi30k"


@pytest.mark.parametrize(("split", "wrong"), [("test_2016_flickr", 0), ("val", 1)])
def test_the_ruler_prepares_text_as_published(split: str, wrong: int) -> None:
    if not MULTI30K.is_dir():
        pytest.skip("needs Multi30k in ../shared/data, which is not part of the project")
    raw = read_lines(str(MULTI30K / f"{split}.de.gz"))
    published = read_lines(str(MULTI30K / "tok" / f"{split}.lc.norm.tok.de.gz"))
    ours = lower_tokenise(raw, "de")
    assert sum(a != b for a, b in zip(ours, published, strict=True)) == wrong


def test_scores_carry_signatures_and_differ_by_ruler() -> None:
    references = ["Der alte Lehrer liest ein Buch.", "Das Kind ist müde, oder?"]
    found = score(references, references, "de")
    assert found["bleu"] == pytest.approx(100)
    assert found["chrf"] == pytest.approx(100)
    assert found["bleu_lower_tokenised"] == pytest.approx(100)
    assert found["exact"] == 1
    assert "tok:13a" in found["signatures"]["bleu"]
    assert "tok:none" in found["signatures"]["bleu_lower_tokenised"]
    outputs = [references[0].lower(), references[1]]
    found = score(outputs, references, "de")
    assert found["bleu"] < 90
    assert found["bleu_lower_tokenised"] == pytest.approx(100)
    assert found["exact"] == 0.5
    assert "bleu_lower_tokenised" not in score(outputs, references)


def test_languages_that_moses_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--language=xx: must be one of .*de, .*en, "):
        score(["a"], ["a"], "xx")


def test_corpus_loss_is_over_tokens_not_batches() -> None:
    found = corpus_loss([(10.0, 1), (20.0, 19)])
    assert found["loss"] == pytest.approx(1.5)
    assert found["perplexity"] == pytest.approx(4.4816890703)
