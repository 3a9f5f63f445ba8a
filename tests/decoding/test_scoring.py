"""Scores of given pairs: those of the search itself, token by token, and alignments."""

import re
from typing import Any

import numpy as np
import pytest

from transformer_jax.config import DecodeConfig
from transformer_jax.decoding.alignment import align, pharaoh, word_weights
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import EOS

LINES = ["red old", "", "blue new green"]


@pytest.fixture(scope="module")
def translator(finished: Run) -> Translator:
    return Translator.load(finished.folder, decode=DecodeConfig(beam=3, penalty="none"))


def test_scores_are_those_of_the_search(translator: Translator) -> None:
    best = [translation.hypotheses[0] for translation in translator.stream(LINES)]
    sources = [translator.encode(line, 1) for line in LINES]
    ids = [hypothesis.ids for hypothesis in best]
    scores = Scorer(translator).of_ids(list(zip(sources, ids, strict=True)))
    for hypothesis, score in zip(best, scores, strict=True):
        assert score.ids == hypothesis.ids
        assert len(score.log_probs) == len(hypothesis.ids)
        np.testing.assert_allclose(score.log_prob, hypothesis.score, rtol=0, atol=1e-4)
        np.testing.assert_allclose(sum(score.log_probs), score.log_prob, atol=1e-5)
    assert scores[1].log_prob == 0
    assert all(score.log_prob < 0 for score in scores[::2])


def test_each_source_has_a_target(translator: Translator) -> None:
    with pytest.raises(UserError, match="3 sources and 1 targets: must be as many"):
        Scorer(translator)(LINES, ["rot"])


def test_text_is_scored_with_its_end_symbol(translator: Translator) -> None:
    one, blank, other = Scorer(translator)(LINES, ["rot alt", "", ""])
    assert one.ids == (*translator.tokenizers.target.encode("rot alt"), EOS)
    assert other.ids == (EOS,)
    assert blank.ids == ()


def test_pairs_without_a_score_have_a_reason(translator: Translator) -> None:
    """They do not end the scoring of the others."""
    sources = ["red", "", "red", "red " * 200, "red"]
    targets = ["rot", "alt", "rot " * 200, "rot", "rot"]
    first, blank, *long, last = Scorer(translator)(sources, targets)
    assert first.log_prob == pytest.approx(last.log_prob, abs=1e-5)
    assert first.reason is last.reason is None
    assert blank.reason == "has a target, but a blank source; give both"
    for pair, side in zip(long, ("target", "source"), strict=True):
        assert pair.reason is not None
        assert re.fullmatch(rf"its {side} has \d+ tokens; must be at most 31", pair.reason)
    assert all(np.isnan(pair.log_prob) for pair in (blank, *long))


def test_attention_is_that_of_the_chosen_heads(translator: Translator) -> None:
    def weights(*heads: tuple[int, int | None]) -> Any:
        (pair,) = Scorer(translator, heads)(["blue new green"], ["blau neu"])
        return pair.attention

    source = translator.encode("blue new green", 1)
    target = [*translator.tokenizers.target.encode("blau neu"), EOS]
    layers = translator.config.model.depths[1]
    every = np.stack([weights((layer, None)) for layer in range(layers)])
    assert every.shape == (layers, len(target), len(source))
    np.testing.assert_allclose(every.sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(weights(), every.mean(0), rtol=1e-5)
    heads = [weights((0, head)) for head in range(translator.config.model.heads)]
    np.testing.assert_allclose(np.mean(heads, axis=0), every[0], rtol=1e-5)
    assert not np.allclose(heads[0], heads[1], atol=1e-3)
    last = layers - 1
    with pytest.raises(UserError, match=f"layer {layers} of cross-attention: .* from 0 to {last}"):
        weights((layers, None))
    with pytest.raises(UserError, match="head 99 of cross-attention: does not exist"):
        weights((0, 99))


def test_words_have_the_weights_of_their_pieces() -> None:
    weights = np.array([[0.1, 0.2, 0.3, 0.4], [0.5, 0.3, 0.2, 0.0], [0.0, 0.1, 0.7, 0.2]])
    source, target = ["▁a", "b", "▁c", "d"], ["▁x", "▁y", "z"]
    words = word_weights(weights, source, target)
    np.testing.assert_allclose(words, [[0.3, 0.7], [0.45, 0.55]])
    assert align(words) == [(1, 0), (1, 1)]
    assert pharaoh(align(weights)) == "3-0 0-1 2-2"
    assert align(word_weights(weights[:0], source, [])) == []
    assert align(weights[:, :0]) == []
