"""Logits processors against loops over lists, and samples against their distribution."""

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import never

from transformer_jax.decoding.beam import beam_search
from transformer_jax.decoding.processors import (
    NO_PADDING,
    Processor,
    SearchContext,
    Sentences,
    at_least_min_length,
    forced_prefix,
    no_repeat_ngrams,
    repetition_penalty,
    suppress,
    temperature,
    top_k,
    top_p,
)
from transformer_jax.decoding.search import Hypotheses, Rules, Strategy, greedy, sample, search
from transformer_jax.special_ids import BOS, EOS, PAD

pytestmark = pytest.mark.usefixtures("strict")

SENTENCES, BEAMS, VOCABULARY, LENGTH = 3, 2, 7, 6
IDS = np.random.default_rng(0).integers(1, VOCABULARY, (SENTENCES, BEAMS, LENGTH))
LOG_PROBS = np.log(np.random.default_rng(1).dirichlet([1.0] * VOCABULARY, (SENTENCES, BEAMS)))


def apply(process: Processor, position: int, **sentences: Any) -> np.ndarray:
    """The processed log probabilities once `position` of IDS are there."""
    ids = np.where(np.arange(LENGTH) < position, IDS, PAD)
    log_probs = jnp.asarray(LOG_PROBS, jnp.float32)
    limits = Sentences(jnp.full(SENTENCES, LENGTH), **sentences)
    context = SearchContext(jnp.asarray(position), jnp.asarray(ids), log_probs, limits)
    return np.asarray(jax.jit(process)(log_probs, context))


def assert_allowed(processed: np.ndarray, allowed: np.ndarray) -> None:
    """Ids that are allowed keep their log probabilities, the others have -inf."""
    wanted = np.where(allowed, LOG_PROBS.astype(np.float32), -np.inf)
    np.testing.assert_array_equal(processed, wanted)


def everything() -> np.ndarray:
    return np.ones_like(LOG_PROBS, bool)


def test_suppressed_ids_are_forbidden() -> None:
    for process, ids in ((partial(suppress, ids=(1, 3)), [1, 3]), (NO_PADDING, [PAD])):
        allowed = everything()
        allowed[..., ids] = False
        assert_allowed(apply(process, 0), allowed)


def test_the_end_is_forbidden_before_the_minimum() -> None:
    for position in range(LENGTH):
        allowed = everything()
        allowed[0, :, EOS] = position >= 2
        allowed[1, :, EOS] = position >= 4
        process = partial(at_least_min_length, end_id=EOS)
        processed = apply(process, position, min_length=jnp.array([2, 4, 0]))
        assert_allowed(processed, allowed)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_ngram_is_repeated(size: int) -> None:
    forbidden = 0
    for position in range(LENGTH + 1):
        allowed = everything()
        for b, k in np.ndindex(SENTENCES, BEAMS):
            held = IDS[b, k, :position].tolist()
            ngrams = [held[i : i + size] for i in range(position - size + 1)]
            for w in range(VOCABULARY):
                allowed[b, k, w] = [*held[len(held) - size + 1 :], w][-size:] not in ngrams
        assert_allowed(apply(partial(no_repeat_ngrams, size=size), position), allowed)
        forbidden += (~allowed).sum()
    assert forbidden > 0 or size == 3


def test_ids_that_are_held_are_penalised() -> None:
    for position in range(LENGTH + 1):
        wanted = LOG_PROBS.astype(np.float32)
        for b, k in np.ndindex(SENTENCES, BEAMS):
            for w in set(IDS[b, k, :position].tolist()):
                wanted[b, k, w] *= np.float32(1.5)
        processed = apply(partial(repetition_penalty, factor=1.5), position)
        np.testing.assert_array_equal(processed, wanted)


@pytest.mark.parametrize("count", [1, 3, 20])
def test_the_likeliest_ids_are_kept(count: int) -> None:
    rank = np.argsort(np.argsort(-LOG_PROBS, axis=-1), axis=-1)
    assert_allowed(apply(partial(top_k, count=count), 0), rank < count)


@pytest.mark.parametrize("mass", [0.01, 0.5, 0.9, 1.0])
def test_the_fewest_ids_of_a_mass_are_kept(mass: float) -> None:
    allowed = everything()
    for b, k in np.ndindex(SENTENCES, BEAMS):
        total = 0.0
        for w in np.argsort(-LOG_PROBS[b, k]):
            allowed[b, k, w] = total < mass
            total += np.exp(LOG_PROBS[b, k, w])
    assert_allowed(apply(partial(top_p, mass=mass), 0), allowed)


def test_top_p_is_of_what_is_allowed() -> None:
    best = LOG_PROBS[0, 0].argmax()

    def process(log_probs: Any, context: SearchContext) -> Any:
        return top_p(suppress(log_probs, context, ids=(int(best),)), context, mass=0.01)

    processed = apply(process, 0)[0, 0]
    assert np.isfinite(processed).sum() == 1
    assert processed.argmax() == np.argsort(-LOG_PROBS[0, 0])[1]


def test_a_prefix_is_forced_whatever_else_is_forbidden() -> None:
    prefix = np.array([[4, 5], [6, PAD], [PAD, PAD]])

    def process(log_probs: Any, context: SearchContext) -> Any:
        return forced_prefix(suppress(log_probs, context, ids=(5, 6)), context)

    for position in range(3):
        allowed = everything()
        allowed[..., [5, 6]] = False
        for b in range(SENTENCES):
            word = prefix[b, position] if position < 2 else PAD
            if word != PAD:
                allowed[b] = np.arange(VOCABULARY) == word
        assert_allowed(apply(process, position, prefix=jnp.asarray(prefix)), allowed)
    none = jnp.zeros((SENTENCES, 0), jnp.int32)
    assert_allowed(apply(forced_prefix, 0, prefix=none), everything())


# ----- in searches

KEYS = jax.random.key_data(jax.random.split(jax.random.key(7), SENTENCES))
BIGRAMS = jnp.asarray(np.random.default_rng(2).normal(size=(VOCABULARY, VOCABULARY)), jnp.float32)


def bigram_step(ids: Any, state: Any, _: Any) -> Any:
    """The logits depend on the last id alone."""
    return BIGRAMS[ids], state, None


def find(strategy: Strategy, *processors: Processor, **sentences: Any) -> Hypotheses:
    limits = Sentences(jnp.full(SENTENCES, LENGTH), **sentences)
    rules = Rules(LENGTH, BOS, EOS, processors=(NO_PADDING, *processors))
    run = jax.jit(lambda sentences: search(strategy, bigram_step, (), sentences, rules))
    hypotheses = run(limits)
    assert hypotheses.ids.shape == (SENTENCES, strategy.beams, LENGTH)
    return hypotheses


STRATEGIES = {"greedy": greedy(), "beam": beam_search(3, never), "sample": sample(3)}


@pytest.mark.parametrize("name", STRATEGIES)
def test_reported_scores_are_the_models_own(name: str) -> None:
    strategy = STRATEGIES[name]
    processors = (
        partial(repetition_penalty, factor=2.0),
        partial(temperature, value=0.5),
        partial(no_repeat_ngrams, size=2),
        partial(suppress, ids=(4,)),
    )
    prefix = jnp.array([[4, 4], [6, PAD], [PAD, PAD]])
    hypotheses = find(strategy, *processors, forced_prefix, prefix=prefix, keys=KEYS)
    of_model = np.asarray(jax.nn.log_softmax(BIGRAMS))
    for b, k in np.ndindex(SENTENCES, strategy.beams):
        ids = [BOS, *[i for i in hypotheses.ids[b, k].tolist() if i != PAD]]
        wanted = sum(of_model[last, i] for last, i in pairwise(ids))
        np.testing.assert_allclose(hypotheses.log_probs[b, k], wanted, rtol=1e-5)
        np.testing.assert_allclose(hypotheses.scores[b, k], wanted, rtol=1e-5)
        forced = [i for i in prefix[b].tolist() if i != PAD]
        assert ids[1 : len(forced) + 1] == forced
        assert 4 not in ids[len(forced) + 1 :]
        pairs = [*pairwise(ids[1:])]
        assert len(set(pairs)) == len(pairs)


def test_samples_have_the_frequencies_of_the_distribution() -> None:
    """χ² of the first and the second id of 4,000 samples of each sentence: 5 and 25 degrees of
    freedom, whose 99.9 % quantiles are 20.5 and 52.6."""
    hypotheses = find(sample(4000), partial(temperature, value=2.0), keys=KEYS)
    weights = np.exp(np.asarray(BIGRAMS) / 2)
    weights[:, PAD] = 0
    chances = weights / weights.sum(1, keepdims=True)
    for ids in np.asarray(hypotheses.ids):
        words = [w for w in range(VOCABULARY) if w != PAD]
        counts = np.bincount(ids[:, 0], minlength=VOCABULARY)
        assert counts[PAD] == 0
        wanted = 4000 * chances[BOS]
        assert sum((counts[w] - wanted[w]) ** 2 / wanted[w] for w in words) < 20.5
        square = 0.0
        for first in words:
            if first != EOS:
                seconds = np.bincount(ids[ids[:, 0] == first, 1], minlength=VOCABULARY)
                wanted = seconds.sum() * chances[first]
                square += sum((seconds[w] - wanted[w]) ** 2 / wanted[w] for w in words)
        assert square < 52.6
    counts = {tuple(np.bincount(ids[:, 0])) for ids in np.asarray(hypotheses.ids)}
    assert len(counts) == SENTENCES  # each has samples of its own


def test_samples_depend_on_their_key_alone() -> None:
    hypotheses, turned = (find(sample(3), keys=k) for k in (KEYS, KEYS[::-1]))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[::-1]), hypotheses, turned)
    assert np.all(np.diff(hypotheses.scores) <= 0)


def test_samples_of_the_likeliest_id_are_greedy() -> None:
    hypotheses = find(sample(1), partial(top_k, count=1), keys=KEYS)
    np.testing.assert_array_equal(hypotheses.ids, find(greedy()).ids)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_sentence_without_an_allowed_output_has_no_hypothesis(name: str) -> None:
    hypotheses = find(STRATEGIES[name], partial(suppress, ids=range(VOCABULARY)), keys=KEYS)
    assert (hypotheses.scores == -jnp.inf).all()
    assert not hypotheses.ids.any()
