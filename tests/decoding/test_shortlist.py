"""Searches among the candidates of each source."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from transformer_jax.decoding.translator import Translator
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import EOS, UNK

LINES = ["red old", "blue new green", "", "old old red new", "green"]


@pytest.fixture(scope="module")
def translator(finished: Run) -> Translator:
    return Translator.load(finished.folder, decode=replace(finished.config.decode, beam=1))


def test_all_candidates_are_no_shortlist(translator: Translator) -> None:
    everything = np.arange(translator.tokenizers.target.size, dtype=np.int32)
    for decode in (translator.config.decode, replace(translator.config.decode, beam=3, n_best=2)):
        plain = translator.with_search(decode)
        outputs = zip(plain(LINES), plain.with_shortlist(lambda _: everything)(LINES), strict=True)
        for wanted, found in outputs:
            for ours, theirs in zip(found.hypotheses, wanted.hypotheses, strict=True):
                assert ours.ids == theirs.ids
                assert ours.log_prob == pytest.approx(theirs.log_prob, abs=1e-4)


def test_outputs_consist_of_the_candidates_of_their_own_source(translator: Translator) -> None:
    target = translator.tokenizers.target

    def every_third(source: list[int]) -> np.ndarray:
        return np.array([EOS, *range(UNK + 1 + source[0] % 3, target.size, 3)], np.int32)

    listed = translator.with_shortlist(every_third)
    together = listed(LINES)
    for line, output in zip(LINES, together, strict=True):
        alone = listed(line)
        assert alone.hypotheses[0].ids == output.hypotheses[0].ids
        assert alone.hypotheses[0].log_prob == pytest.approx(output.hypotheses[0].log_prob, abs=1e-4)
        if line:
            allowed = set(every_third(translator.encode(line)).tolist())
            others = [i for i in range(UNK + 1, target.size) if i not in allowed]
            decode = replace(translator.config.decode, suppress=(*target.pieces(others), "<unk>"))
            assert output.hypotheses[0].ids == translator.with_search(decode)(line).hypotheses[0].ids
    assert [output.text for output in together] != [output.text for output in translator(LINES)]


def test_what_a_caller_asks_for_is_a_candidate(translator: Translator) -> None:
    listed = translator.with_shortlist(lambda _: np.array([EOS], np.int32))
    assert [*listed.stream(["old red"], prefixes=["wen"])][0].text == "wen"
    beam = replace(translator.config.decode, beam=8)
    assert "wen" in [*listed.with_search(beam).stream(["old red"], phrases=[["wen"]])][0].text
