"""Ensembles: the mean of probabilities, of models of different sizes with the same ids."""

import copy
import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import build, make_batch, tiny

from transformer_jax.config import DecodeConfig
from transformer_jax.decoding.ensemble import make_step, prefill
from transformer_jax.decoding.scoring import Scorer, make_score
from transformer_jax.decoding.strategies import Lines, make_search
from transformer_jax.decoding.trained import Member, padded
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import BOS, EOS, UNK
from transformer_jax.text.corpus import Corpus
from transformer_jax.training.oracles import decode_steps
from transformer_jax.training.validation import evaluate

LINES = ["red old", "blue new green"]


def test_the_step_averages_probabilities() -> None:
    built = [build(tiny(decoder_start_id=start)) for start in (None, 2)]
    source = make_batch([(7, 1), (3, 1)]).source

    @jax.jit
    def first(all_params: Any) -> Any:
        models = [model for model, _ in built]
        state = prefill(models, all_params, jnp.asarray(source), 3, 8)
        ids = jnp.full((2, 3), 5, jnp.int32)
        step = make_step(models, all_params)
        logits, state, _ = step(ids, state, jnp.asarray(0))
        return logits, step(ids, state, jnp.asarray(1))[0]

    together, apart = first([params for _, params in built]), []
    for model, params in built:
        targets = np.array([model.config.start_id, 5], np.int32)
        logits, _ = decode_steps(model, params, source, np.broadcast_to(targets, (2, 3, 2)), 1)
        apart.append(jax.nn.softmax(logits))
    mean = jnp.mean(jnp.stack(apart), axis=0)
    np.testing.assert_allclose(jnp.exp(jnp.stack(together, axis=2)), mean, atol=1e-6)


def test_a_beam_as_wide_as_the_space_is_brute_force() -> None:
    """The models have another first input of the decoder each, and another self-layer."""
    configs = [tiny(decoder_start_id=None), tiny(layers=2, self_layer="ssru")]
    models, params = map(list, zip(*(build(config, 4, 4) for config in configs), strict=True))
    outputs = [
        ids
        for length in range(1, 5)
        for ids in itertools.product((BOS, EOS, UNK), repeat=length)
        if EOS not in ids[:-1] and (length == 4 or ids[-1] == EOS)
    ]
    count, target = len(outputs), padded(outputs, (len(outputs), 4))
    source = np.array([[UNK, BOS, UNK, EOS]], np.int32)
    decode = DecodeConfig(beam=count, n_best=count, penalty="none", max_length=4)
    found = jax.jit(make_search(models, decode))(params, Lines(source))
    scored, _ = jax.jit(make_score(models))(params, [np.repeat(source, count, axis=0), target])
    scores = np.sum(scored, axis=1)
    order = np.argsort(-scores)
    np.testing.assert_array_equal(found.ids[0], target[order])
    np.testing.assert_allclose(found.scores[0], scores[order], rtol=1e-5)


@pytest.mark.long
def test_the_loss_of_an_ensemble_is_that_of_its_mean_probabilities(finished: Run) -> None:
    """In both orders."""
    (corpus,) = finished.config.data.dev
    sources, targets = zip(*Corpus(corpus).pairs(), strict=True)
    first, last = finished.params(), finished.params(finished.newest_steps()[0])
    of = partial(Translator, finished.config, finished.tokenizers)
    losses = [
        next(evaluate(of(one, others=[Member(finished.config.model, other)]), [corpus])).scores
        for one, other in ((first, last), (last, first))
    ]
    both = of(first, others=[Member(finished.config.model, last)])
    scored = Scorer(both)(sources, targets)
    wanted = -sum(pair.log_prob for pair in scored) / sum(len(pair.ids) for pair in scored)
    for each in losses:
        np.testing.assert_allclose(each["loss"], wanted, rtol=1e-5)


def test_runs_of_other_tokenizers_are_refused(finished: Run, tmp_path: Path) -> None:
    source = copy.copy(finished.tokenizers.source)
    source.digest = "other"
    tokenizers = finished.tokenizers._replace(source=source)
    other = replace(finished, folder=tmp_path, tokenizers=tokenizers)
    with pytest.raises(UserError, match=r"source vocabulary is not that of .* share their tokeni"):
        Translator.load(finished, other)
