"""All attention weights of a pair."""

import numpy as np

from transformer_jax.decoding.attention_weights import attention_weights
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.translator import Translator
from transformer_jax.runs.run import Run


def test_they_are_those_of_teacher_forcing(finished: Run) -> None:
    translator = Translator.load(finished.folder)
    weights = attention_weights(translator, "red green", "grün rot")
    assert weights.source[-1] == weights.outputs[-1] == "</s>"
    assert weights.inputs == ["<s>", *weights.outputs[:-1]]
    assert [*weights.layers] == ["encoder", "decoder", "cross"]
    assert all([*layers] == [0] for layers in weights.layers.values())
    (pair,) = Scorer(translator, heads=[(0, 1)])(["red green"], ["grün rot"])
    assert pair.attention is not None
    np.testing.assert_allclose(weights.layers["cross"][0][1], pair.attention, atol=1e-6)
    for layers in weights.layers.values():
        np.testing.assert_allclose(layers[0].sum(axis=-1), 1, rtol=1e-5)
    assert not np.triu(weights.layers["decoder"][0], 1).any()
