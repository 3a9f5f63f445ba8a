"""Text in, translations out: hypotheses with text, ids and scores."""

import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import DecodeConfig
from transformer_jax.decoding.search import NO_PADDING, suppress
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import EOS, PAD

LINES = ["red old", "", "blue new green"]


def test_translations_hold_what_was_asked_for(finished: Run) -> None:
    """Text, ids and score of the n best hypotheses, best first; the text is that of the ids."""
    translator = Translator.load(finished.folder, decode=DecodeConfig(beam=3))
    one, blank, other = translator.stream(LINES, n_best=3)
    assert blank.text == ""
    assert len(blank.hypotheses) == 1
    assert max(len(each.hypotheses) for each in (one, other)) > 1
    for translation in (one, other):
        assert 1 <= len(translation.hypotheses) <= 3
        scores = [hypothesis.score for hypothesis in translation.hypotheses]
        assert scores == sorted(scores, reverse=True)
        assert np.isfinite(scores).all()
        assert len({hypothesis.ids for hypothesis in translation.hypotheses}) == len(scores)
        for text, ids, _ in translation.hypotheses:
            assert PAD not in ids
            assert EOS not in ids[:-1]
            assert text == translator.tokenizers.target.decode([i for i in ids if i != EOS])
    best = [translation.text for translation in translator.stream(LINES)]
    assert best == translator(LINES) == [one.text, "", other.text]


@pytest.mark.parametrize("n_best", [0, 4])
def test_more_hypotheses_than_beams_are_refused(finished: Run, n_best: int) -> None:
    translator = Translator.load(finished.folder, decode=DecodeConfig(beam=3))
    with pytest.raises(UserError, match=rf"n_best={n_best}: must be from 1 to decode.beam=3"):
        next(translator.stream(LINES, n_best=n_best))


def test_suppressed_ids_never_follow_and_nothing_is_renormalised() -> None:
    log_probs = jnp.log(jnp.full((1, 2, 4), 0.25))
    so_far = jnp.zeros((1, 2, 5), jnp.int32), jnp.zeros((), jnp.int32)
    found = np.asarray(suppress((1, 3))(log_probs, *so_far))
    np.testing.assert_array_equal(found[..., [1, 3]], -np.inf)
    np.testing.assert_array_equal(found[..., [0, 2]], log_probs[..., [0, 2]])
    only = np.asarray(NO_PADDING(log_probs, *so_far))
    np.testing.assert_array_equal(np.isinf(only[0, 0]), [True, False, False, False])
