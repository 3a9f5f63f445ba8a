"""Searches against brute force over a lookup table, and against the model's own scores.

In the table the logits after a prefix are a hash of all its ids and of its sentence's number, so
that hypotheses whose state was reordered wrongly score differently.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import build, forward, make_batch, shift_right, tiny

from transformer_jax.decoding.search import (
    Hypotheses,
    beam_search,
    gnmt_penalty,
    greedy,
    power_penalty,
)
from transformer_jax.special_ids import BOS, EOS, PAD, UNK
from transformer_jax.types import Batch, DecodeState

pytestmark = pytest.mark.usefixtures("strict")

WORDS = (BOS, EOS, UNK, 4)  # all ids but padding
PENALTIES = {
    "none": power_penalty(0.0),
    "gnmt 0.6": gnmt_penalty(0.6),
    "gnmt 2": gnmt_penalty(2.0),
    "mean": power_penalty(1.0),
}


# ----- the table


def follow(prefix: Any, ids: Any) -> Any:
    """The hash of a prefix with one more id."""
    word = (prefix ^ (ids.astype(np.uint32) + np.uint32(1))) * np.uint32(0x9E3779B1)
    return word ^ (word >> np.uint32(15))


def logits_after(prefix: Any, sentence: Any) -> Any:
    """[..., 5] between 0 and 6."""
    ids = np.arange(5, dtype=np.uint32).reshape((1,) * prefix.ndim + (5,))
    words = follow(follow((prefix ^ sentence)[..., None], ids), ids)
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(6 / 2**24)


def table_step(ids: Any, state: DecodeState, index: Any) -> Any:
    prefix = follow(state.beams, ids)
    return logits_after(prefix, state.memory[:, None]), DecodeState(state.memory, prefix), None


def start(sentences: Any, beams: int) -> DecodeState:
    numbers = jnp.asarray(sentences, jnp.uint32)
    return DecodeState(numbers, jnp.zeros((len(sentences), beams), jnp.uint32))


LIMITS: dict[str, Any] = {"start_id": BOS, "end_id": EOS}


@cache
def compiled(name: str, beams: int, max_length: int) -> Callable[..., Hypotheses]:
    """The beam search on the table, or for 0 beams the greedy one: (state, lengths)."""
    limits = LIMITS | {"max_length": max_length, "penalty": PENALTIES[name]}
    if beams == 0:
        return jax.jit(lambda state, n: greedy(table_step, state, lengths=n, **limits))
    return jax.jit(
        lambda state, n: beam_search(table_step, state, beams=beams, lengths=n, **limits)
    )


def search(name: str, beams: int, max_length: int, sentences: Any, lengths: Any) -> Hypotheses:
    state = start(sentences, max(beams, 1))
    return compiled(name, beams, max_length)(state, jnp.asarray(lengths, jnp.int32))


class Scored(NamedTuple):
    score: float
    ids: tuple[int, ...]


def grow(sentence: int, hypothesis: Scored) -> list[Scored]:
    """A hypothesis with each word behind it, best first; scores are log probabilities."""
    prefix = np.zeros(1, np.uint32)
    for i in (BOS, *hypothesis.ids):
        prefix = follow(prefix, np.array([i]))
    logits = logits_after(prefix, np.uint32(sentence))[0].astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum())
    grown = [Scored(hypothesis.score + log_probs[w], (*hypothesis.ids, w)) for w in WORDS]
    return sorted(grown, reverse=True)


def penalised(hypotheses: list[Scored], name: str) -> list[Scored]:
    """Best first, by the penalised score."""
    divisors = [float(PENALTIES[name](jnp.asarray(float(len(h.ids))))) for h in hypotheses]
    scored = [Scored(h.score / d, h.ids) for h, d in zip(hypotheses, divisors, strict=True)]
    return sorted(scored, reverse=True)


@cache
def sequences(sentence: int, length: int) -> list[Scored]:
    """Every sequence there is: to the end symbol, or of `length` words without it."""
    alive, ended = [Scored(0.0, ())], []
    for _ in range(length):
        grown = [g for hypothesis in alive for g in grow(sentence, hypothesis)]
        ended += [g for g in grown if g.ids[-1] == EOS]
        alive = [g for g in grown if g.ids[-1] != EOS]
    return ended + alive


def simple_beam(sentence: int, beams: int, length: int, name: str) -> list[Scored]:
    """Beam search over lists, which never stops early."""
    alive, ended = [Scored(0.0, ())], []
    for position in range(length):
        grown = [g for hypothesis in alive for g in grow(sentence, hypothesis)]
        grown = sorted(grown, reverse=True)[: 2 * beams]
        last = position + 1 == length
        ended += [g for i, g in enumerate(grown) if last or (g.ids[-1] == EOS and i < beams)]
        alive = [g for g in grown if g.ids[-1] != EOS][:beams]
    return penalised(ended, name)[:beams]


def assert_found(found: Hypotheses, row: int, wanted: list[Scored]) -> None:
    """The row has the `wanted` hypotheses, and is empty after them."""
    ids, scores = np.zeros_like(found.ids[row]), np.full(found.scores.shape[1], -np.inf)
    for i, hypothesis in enumerate(wanted):
        ids[i, : len(hypothesis.ids)], scores[i] = hypothesis.ids, hypothesis.score
    np.testing.assert_array_equal(found.ids[row], ids)
    np.testing.assert_allclose(found.scores[row], scores, rtol=2e-5)


# ----- searches on the table


@pytest.mark.parametrize("name", PENALTIES)
def test_beam_as_wide_as_the_space_is_brute_force(name: str) -> None:
    sentences, lengths = range(10), [1, 2, 3, 4, 0] * 2
    beams = len(sequences(0, 4))
    assert beams == 1 + 3 + 9 + 27 + 81
    found = search(name, beams, 4, sentences, lengths)
    for row, (sentence, length) in enumerate(zip(sentences, lengths, strict=True)):
        everything = sequences(sentence, length) if length else []
        assert_found(found, row, penalised(everything, name))


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("beams", [2, 3])
def test_beam_is_the_simple_one_that_never_stops_early(name: str, beams: int) -> None:
    sentences, lengths = range(40), [8, 3, 5, 1, 2] * 8
    found = search(name, beams, 8, sentences, lengths)
    for row, (sentence, length) in enumerate(zip(sentences, lengths, strict=True)):
        assert_found(found, row, simple_beam(sentence, beams, length, name))


def test_greedy_takes_the_likeliest_word_and_is_a_beam_of_one() -> None:
    sentences, lengths = range(40), [8, 3, 5, 1, 0] * 8
    found, beam = (search("none", beams, 8, sentences, lengths) for beams in (0, 1))
    np.testing.assert_array_equal(found.ids, beam.ids)
    np.testing.assert_allclose(found.scores, beam.scores, rtol=1e-6)
    for row, (sentence, length) in enumerate(zip(sentences, lengths, strict=True)):
        best = Scored(0.0, ())
        while len(best.ids) < length and best.ids[-1:] != (EOS,):
            best = grow(sentence, best)[0]
        assert_found(found, row, [best] if length else [])


def test_greedy_scores_are_penalised_as_those_of_a_beam() -> None:
    plain, mean = (search(name, 0, 8, range(9), [5] * 9) for name in ("none", "mean"))
    length = np.sum(np.asarray(plain.ids) != PAD, axis=2)
    assert length.max() > 1
    np.testing.assert_allclose(np.asarray(mean.scores) * length, plain.scores, rtol=1e-6)


def test_nothing_follows_the_end() -> None:
    found = search("gnmt 0.6", 3, 8, range(40), [8, 4] * 20)
    for row, hypotheses in enumerate(np.asarray(found.ids)):
        for ids in hypotheses.tolist():
            length = ids.index(EOS) + 1 if EOS in ids else [8, 4][row % 2]
            assert all(ids[:length])
            assert not any(ids[length:])
    assert np.all(np.diff(found.scores) <= 0)


@pytest.mark.parametrize("beams", [0, 3])
def test_sentences_do_not_depend_on_each_other(beams: int) -> None:
    lengths = np.array([8, 3, 5, 1, 0] * 8)
    whole = search("gnmt 0.6", beams, 8, np.arange(40), lengths)
    order = np.random.default_rng(0).permutation(40)[:11]
    part = search("gnmt 0.6", beams, 8, np.arange(40)[order], lengths[order])
    np.testing.assert_array_equal(part.ids, np.asarray(whole.ids)[order])
    np.testing.assert_array_equal(part.scores, np.asarray(whole.scores)[order])


@pytest.mark.parametrize("beams", [0, 3])
def test_lengths_above_the_maximum_are_the_maximum(beams: int) -> None:
    found, wanted = (search("mean", beams, 4, range(9), [n] * 9) for n in (20, 4))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_padding_is_never_chosen() -> None:
    def step(ids: Any, state: Any, index: Any) -> Any:
        logits = table_step(ids, state, index)[0]
        return logits.at[..., PAD].set(20.0), state, None

    limits: dict[str, Any] = LIMITS | {"max_length": 3, "penalty": power_penalty(0.0)}
    lengths = jnp.full(4, 3, jnp.int32)
    for found in (
        greedy(step, start(range(4), 1), lengths=lengths, **limits),
        beam_search(step, start(range(4), 2), beams=2, lengths=lengths, **limits),
    ):
        assert (found.ids[:, :, 0] != PAD).all()
        assert jnp.isfinite(found.scores).all()


@pytest.mark.parametrize("beams", [0, 1, 2])
def test_search_stops_when_every_sentence_is_done(beams: int) -> None:
    calls = []

    def step(ids: Any, state: Any, index: Any) -> Any:
        """Ends at position 2 (with a probability of 0.999) or, in the second sentence, at 4."""
        calls.append(int(index))
        last = jnp.array([2, 4])[:, None, None]
        going = jnp.array([-20.0, 4.0, -20.0, 5.0, -20.0]).reshape(1, 1, 5)
        ending = jnp.array([-20.0, 0.0, 9.0, 1.0, -20.0]).reshape(1, 1, 5)
        logits = jnp.where(index < last, going, ending)
        return jnp.broadcast_to(logits, (*ids.shape, 5)), state, None

    def run(lengths: list[int]) -> Hypotheses:
        calls.clear()
        limits = LIMITS | {"max_length": 30, "penalty": PENALTIES["gnmt 0.6"]}
        bound = jnp.array(lengths)
        with jax.disable_jit():
            if beams == 0:
                return greedy(step, start(range(2), 1), lengths=bound, **limits)
            return beam_search(step, start(range(2), beams), beams=beams, lengths=bound, **limits)

    found = run([30, 30])
    assert calls == [0, 1, 2, 3, 4]
    assert found.ids[0, 0].tolist() == [3, 3, EOS] + [PAD] * 27
    assert found.ids[1, 0].tolist() == [3, 3, 3, 3, EOS] + [PAD] * 25
    run([30, 0])
    assert calls == [0, 1, 2]
    run([1, 2])
    assert calls == [0, 1]
    nothing = run([0, 0])
    assert calls == []
    assert not nothing.ids.any()
    assert (nothing.scores == -jnp.inf).all()


def test_penalties() -> None:
    length = jnp.array([1.0, 7.0])
    np.testing.assert_allclose(gnmt_penalty(0.6)(length), [1.0, 2**0.6], rtol=1e-6)
    np.testing.assert_allclose(power_penalty(0.5)(length), [1.0, 7**0.5], rtol=1e-6)


# ----- searches with the model

LENGTHS = [(7, 1), (3, 1), (0, 0), (5, 1), (1, 1)]
BEAMS, LONGEST = 3, 8


@cache
def model_search(beams: int) -> Callable[[Any], Hypotheses]:
    """The search with a small model: source -> hypotheses of at most LONGEST words."""
    model, params = build(tiny())

    @jax.jit
    def run(params: Any, source: Any) -> Hypotheses:
        state: Any = model.apply(
            {"params": params}, source, max(beams, 1), LONGEST, method="prefill"
        )

        def step(ids: Any, state: Any, index: Any) -> Any:
            return model.apply({"params": params}, ids, state, index, method="decode_step")

        limits: dict[str, Any] = LIMITS | {
            "lengths": jnp.where(jnp.any(source != PAD, axis=1), LONGEST, 0),
            "max_length": LONGEST,
            "penalty": PENALTIES["mean" if beams > 1 else "none"],
        }
        if beams == 0:
            return greedy(step, state, **limits)
        return beam_search(step, state, beams=beams, **limits)

    return lambda source: run(params, source)


@pytest.mark.optimised
def test_scores_are_those_of_the_model() -> None:
    source = make_batch(LENGTHS).source
    found = model_search(BEAMS)(source)
    ids = np.asarray(found.ids).reshape(-1, LONGEST)
    batch = Batch(np.repeat(source, BEAMS, axis=0), shift_right(ids), ids)
    logits, _ = forward(tiny())(batch)
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    chosen = np.take_along_axis(log_probs, ids[..., None], axis=2)[..., 0]
    length = (ids != PAD).sum(1)
    wanted = np.where(ids != PAD, chosen, 0).sum(1) / np.maximum(length, 1)
    wanted = np.where(length > 0, wanted, -np.inf).reshape(-1, BEAMS)
    np.testing.assert_allclose(found.scores, wanted, rtol=1e-4)
    assert (wanted[2] == -np.inf).all()
    assert np.isfinite(np.delete(wanted, 2, axis=0)).all()
    assert len({tuple(row) for row in ids[:BEAMS]}) == BEAMS


@pytest.mark.parametrize("beams", [0, BEAMS])
def test_order_and_width_of_the_batch_do_not_matter(beams: int) -> None:
    source = make_batch(LENGTHS).source
    found = model_search(beams)(source)
    turned = model_search(beams)(np.pad(source[::-1], [(0, 0), (0, 4)]))
    np.testing.assert_array_equal(turned.ids[::-1], found.ids)
    np.testing.assert_allclose(turned.scores[::-1], found.scores, rtol=1e-5)


def test_beam_of_one_is_greedy_with_the_model() -> None:
    source = make_batch(LENGTHS).source
    found, beam = (model_search(beams)(source) for beams in (0, 1))
    np.testing.assert_array_equal(found.ids, beam.ids)
    np.testing.assert_allclose(found.scores, beam.scores, rtol=1e-6)
