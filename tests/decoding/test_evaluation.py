"""Scores: the published metric, signatures, Unicode, and losses that add."""

import unicodedata
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
import sacrebleu
from common import Log, Patch

from transformer_jax.config import BleuTokenizer, Config, TrainConfig
from transformer_jax.decoding.evaluation import (
    bleu_metric,
    compare,
    line_scores,
    lower_tokenize,
    score,
    warn_of_unspaced,
)
from transformer_jax.text.files import read_lines
from transformer_jax.training.setup import check_config
from transformer_jax.training.validation import corpus_loss

MULTI30K = Path(__file__).parents[3] / "shared" / "data" / "multi30k"
TOKENIZERS = [name for name in get_args(BleuTokenizer) if "mecab" not in name]


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
    scores = score(references, [references], "de")
    assert scores["bleu"] == pytest.approx(100)
    assert scores["chrf"] == pytest.approx(100)
    assert scores["bleu_lower_tokenized"] == pytest.approx(100)
    assert scores["exact"] == 1
    assert "tok:13a" in scores["signatures"]["bleu"]
    assert "tok:none" in scores["signatures"]["bleu_lower_tokenized"]
    outputs = [references[0].lower(), references[1]]
    scores = score(outputs, [references], "de")
    assert scores["bleu"] < 90
    assert scores["bleu_lower_tokenized"] == pytest.approx(100)
    assert scores["exact"] == 0.5
    assert "bleu_lower_tokenized" not in score(outputs, [references])


def test_the_unicode_form_of_either_side_makes_no_difference() -> None:
    composed = ["Der müde Löwe läuft über die Brücke.", "Die Tür ist grün und schön."]
    decomposed = [unicodedata.normalize("NFD", line) for line in composed]
    for ours, theirs in ((composed, decomposed), (decomposed, composed)):
        scores = score(ours, [theirs], "de")
        assert scores["exact"] == 1
        for metric in ("bleu", "chrf", "bleu_lower_tokenized"):
            assert scores[metric] == pytest.approx(100)


def test_equal_outputs_do_not_differ() -> None:
    outputs = ["ein Hund läuft", "eine Katze schläft"] * 4
    compared = compare(outputs, outputs, [["ein Hund rennt", "eine Katze schläft"] * 4])
    assert [compared[name]["p_value"] for name in ("bleu", "chrf")] == [1.0, 1.0]


def test_languages_that_moses_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--language=xx: must be one of .*de, .*en, "):
        score(["a"], [["a"]], "xx")
    for language in ("zh", "yue"):
        with pytest.raises(ValueError, match=rf"--language={language}: .*--tokenize=zh"):
            score(["a"], [["a"]], language)


CHINESE = [
    "那只老狗睡在一棵大树下。",
    "她在2008年买了3本新书。",
    "今天天气很好，我们去公园散步吧。",
]
OUTPUTS = ["那只老狗睡在大树下。", "她在2008年买了3本书。", "今天天气很好，我们去公园散步。"]


def test_the_tokenizer_of_bleu_is_a_choice_and_stands_in_the_signature() -> None:
    scores = {name: score(OUTPUTS, [CHINESE], tokenize=name) for name in TOKENIZERS}
    for name, result in scores.items():
        theirs = sacrebleu.corpus_bleu(OUTPUTS, [CHINESE], tokenize=name, force=True)
        assert result["bleu"] == theirs.score
        assert f"|tok:{name}|" in result["signatures"]["bleu"]
        compared = compare(CHINESE, OUTPUTS, [CHINESE], name)["bleu"]
        assert compared["ours"]["score"] == pytest.approx(theirs.score)
        assert f"|tok:{name}|" in compared["signature"]
    assert scores["13a"]["bleu"] < 1 < 60 < scores["zh"]["bleu"]


@pytest.mark.parametrize("tokenize", ["ja-mecab", "ko-mecab"])
def test_a_tokenizer_whose_packages_are_missing_is_refused(
    tokenize: BleuTokenizer, monkeypatch: Patch
) -> None:
    module = import_module(f"sacrebleu.tokenizers.tokenizer_{tokenize.replace('-', '_')}")
    monkeypatch.setattr(module, "MeCab", None)
    said = rf"^tokenize={tokenize}: needs packages: pip install 'sacrebleu\[{tokenize[:2]}\]'$"
    with pytest.raises(ValueError, match=said):
        bleu_metric(tokenize)
    with pytest.raises(ValueError, match=said):
        check_config(Config(train=TrainConfig(steps=1, tokenize=tokenize)))


@pytest.mark.parametrize(
    ("lines", "warned"),
    [
        (CHINESE, True),
        (["在这里 我 想 说 一下", "谢谢 大家"], True),
        (["แมวนอนอยู่บนเก้าอี้", "เขาซื้อหนังสือ ใหม่"], True),
        (["今日はとても暑いです。", "本を買いました。", "Ein Wort mehr"], True),
        (["오늘은 날씨가 좋습니다.", "저는 책을 샀습니다."], False),
        (["Der alte Hund schläft.", "Ja.", "Das Buch 書 ist neu."], False),
        (["यह एक किताब है।", "वह सो रहा है।"], False),
        ([], False),
    ],
)
def test_targets_without_spaces_are_said(lines: list[str], warned: bool, caplog: Log) -> None:
    warn_of_unspaced("x.tsv", lines, "zh")
    assert not caplog.text
    warn_of_unspaced("x.tsv", lines, "13a")
    assert ("x.tsv: most targets have no spaces" in caplog.text) == warned


def test_blank_targets_are_said(caplog: Log) -> None:
    warn_of_unspaced("x.tsv", ["das Buch", " ", ""], "13a")
    assert "x.tsv: most targets are blank" in caplog.text
    assert "spaces" not in caplog.text


def test_several_references_are_scored_together() -> None:
    outputs = ["the old dog sleeps under a tree", "she buys a new book today"]
    first = ["an old dog is asleep under the tree", outputs[1]]
    second = [outputs[0], "today she is buying a book"]
    scores = score(outputs, [first, second], "en")
    assert [scores[name] for name in ("exact", "length_ratio")] == [1, 1]
    for name in ("bleu", "chrf", "bleu_lower_tokenized"):
        assert scores[name] == pytest.approx(100)
        assert scores["signatures"][name].startswith("nrefs:2|")
    compared = compare(first, outputs, [first, second])["chrf"]
    assert compared["baseline"]["score"] == pytest.approx(compared["ours"]["score"])
    scores = line_scores(["x", *outputs], [["y", *first], ["z", *second]])
    assert min(scores) == scores[0]
    with pytest.raises(ValueError, match=r"shorter|longer"):
        score(outputs, [first, second[:1]])


def test_corpus_loss_is_over_tokens_not_batches() -> None:
    loss = corpus_loss([(10.0, 1), (20.0, 19)])
    assert loss["loss"] == pytest.approx(1.5)
    assert loss["perplexity"] == pytest.approx(4.4816890703)
