"""Scores: the published metric, signatures, Unicode, and losses that add."""

import unicodedata
from pathlib import Path

import pytest

from transformer_jax.decoding.evaluation import compare, lower_tokenize, score
from transformer_jax.text.files import read_lines
from transformer_jax.training.validation import corpus_loss

MULTI30K = Path(__file__).parents[3] / "shared" / "data" / "multi30k"


@pytest.mark.parametrize(("split", "wrong"), [("test_2016_flickr", 0), ("val", 1)])
def test_the_published_metric_prepares_text_as_published(split: str, wrong: int) -> None:
    if not MULTI30K.is_dir():
        pytest.skip("needs Multi30k in ../shared/data, which is not part of the project")
    raw = read_lines(str(MULTI30K / f"{split}.de.gz"))
    published = read_lines(str(MULTI30K / "tok" / f"{split}.lc.norm.tok.de.gz"))
    ours = lower_tokenize(raw, "de")
    assert sum(a != b for a, b in zip(ours, published, strict=True)) == wrong


def test_scores_carry_signatures_and_differ_by_metric() -> None:
    references = ["Der alte Lehrer liest ein Buch.", "Das Kind ist müde, oder?"]
    scores = score(references, references, "de")
    assert scores["bleu"] == pytest.approx(100)
    assert scores["chrf"] == pytest.approx(100)
    assert scores["bleu_lower_tokenized"] == pytest.approx(100)
    assert scores["exact"] == 1
    assert "tok:13a" in scores["signatures"]["bleu"]
    assert "tok:none" in scores["signatures"]["bleu_lower_tokenized"]
    outputs = [references[0].lower(), references[1]]
    scores = score(outputs, references, "de")
    assert scores["bleu"] < 90
    assert scores["bleu_lower_tokenized"] == pytest.approx(100)
    assert scores["exact"] == 0.5
    assert "bleu_lower_tokenized" not in score(outputs, references)


def test_the_unicode_form_of_either_side_makes_no_difference() -> None:
    composed = ["Der müde Löwe läuft über die Brücke.", "Die Tür ist grün und schön."]
    decomposed = [unicodedata.normalize("NFD", line) for line in composed]
    for sides in ((composed, decomposed), (decomposed, composed)):
        scores = score(*sides, "de")
        assert scores["exact"] == 1
        for metric in ("bleu", "chrf", "bleu_lower_tokenized"):
            assert scores[metric] == pytest.approx(100)


def test_equal_outputs_do_not_differ() -> None:
    outputs = ["ein Hund läuft", "eine Katze schläft"] * 4
    compared = compare(outputs, outputs, ["ein Hund rennt", "eine Katze schläft"] * 4)
    assert [compared[name]["p_value"] for name in ("bleu", "chrf")] == [1.0, 1.0]


def test_languages_that_moses_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--language=xx: must be one of .*de, .*en, "):
        score(["a"], ["a"], "xx")


def test_corpus_loss_is_over_tokens_not_batches() -> None:
    loss = corpus_loss([(10.0, 1), (20.0, 19)])
    assert loss["loss"] == pytest.approx(1.5)
    assert loss["perplexity"] == pytest.approx(4.4816890703)
