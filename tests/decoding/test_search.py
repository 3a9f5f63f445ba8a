"""Searches against brute force over a lookup table, and against the model's own scores.

In the table the logits after a prefix are a hash of all its ids and of its sentence's number, so
that hypotheses whose state was reordered wrongly score differently.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import build, forward, make_batch, never, shift_right, tiny, with_rare

from transformer_jax.decoding import search as searches
from transformer_jax.decoding.beam import PHRASES as HOLD_PHRASES
from transformer_jax.decoding.beam import Stop, beam_search, early_stopping, optimal_stopping
from transformer_jax.decoding.processors import Sentences, gnmt, power, reward, unnormalized
from transformer_jax.decoding.search import Hypotheses, Rules, Strategy, greedy
from transformer_jax.special_ids import BOS, EOS, PAD, UNK
from transformer_jax.types import Batch, LayerState

pytestmark = pytest.mark.usefixtures("strict")

WORDS = (BOS, EOS, UNK, 4)  # all ids but padding
LENGTH_PENALTIES = {
    "none": unnormalized,
    "gnmt 0.6": gnmt(0.6),
    "gnmt 2": gnmt(2.0),
    "gnmt -1": gnmt(-1.0),
    "mean": power(1.0),
    "reward": reward(0.8),
}
NAMES = [*LENGTH_PENALTIES]


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


def table_step(ids: Any, state: LayerState, index: Any) -> Any:
    prefix = follow(state.carry, ids)
    return logits_after(prefix, state.cache[:, None]), LayerState(state.cache, prefix), None


def start(sentences: Any, beams: int) -> LayerState:
    numbers = jnp.asarray(sentences, jnp.uint32)
    return LayerState(numbers, jnp.zeros((len(sentences), beams), jnp.uint32))


def rules(max_length: int, penalty: Any = unnormalized) -> Rules:
    return Rules(max_length, BOS, EOS, penalty)


@cache
def compiled(
    beams: int, max_length: int, stop: Stop, step: Any = table_step, **options: Any
) -> Callable[..., Hypotheses]:
    """The beam search, or for 0 beams the greedy one: (number of the penalty, state, sentences)."""
    strategy, penalties = strategy_of(beams, stop, **options), [*LENGTH_PENALTIES.values()]

    @jax.jit
    def find(number: Any, state: Any, sentences: Sentences) -> Hypotheses:
        common = rules(max_length, lambda *s: jax.lax.switch(number, penalties, *s))
        return searches.search(strategy, step, state, sentences, common)

    return find


def strategy_of(beams: int, stop: Stop, **options: Any) -> Strategy:
    return beam_search(beams, stop, **options) if beams else greedy()


final = cache(optimal_stopping)
"""One function for each number, so that `compiled` knows it again."""


def search(
    name: str, beams: int, max_length: int, sentences: Any, lengths: Any, stop: Stop | None = None
) -> Hypotheses:
    run, number = compiled(beams, max_length, stop or final(beams)), NAMES.index(name)
    return run(number, start(sentences, max(beams, 1)), Sentences(jnp.asarray(lengths, jnp.int32)))


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


def normalized(hypotheses: list[Scored], name: str) -> list[Scored]:
    """Best first, with the length penalty."""
    penalty: Any = LENGTH_PENALTIES[name]
    return sorted((Scored(penalty(h.score, len(h.ids)), h.ids) for h in hypotheses), reverse=True)


@cache
def sequences(sentence: int, length: int) -> list[Scored]:
    """Every sequence there is: to the end symbol, or of `length` words without it."""
    alive, ended = [Scored(0.0, ())], []
    for _ in range(length):
        grown = [g for hypothesis in alive for g in grow(sentence, hypothesis)]
        ended += [g for g in grown if g.ids[-1] == EOS]
        alive = [g for g in grown if g.ids[-1] != EOS]
    return ended + alive


def simple_beam(
    sentence: int, beams: int, length: int, name: str, most: int | None = None, ahead: bool = True
) -> list[Scored]:
    """Beam search over lists, which stops once `most` hypotheses have ended, or never early.

    Without lookahead it stops once `beams` have ended that none beats as it is."""
    alive, ended = [Scored(0.0, ())], []
    for position in range(length):
        grown = [g for hypothesis in alive for g in grow(sentence, hypothesis)]
        grown = sorted(grown, reverse=True)[: 2 * beams]
        last = position + 1 == length
        ended += [g for i, g in enumerate(grown) if last or (g.ids[-1] == EOS and i < beams)]
        alive = [g for g in grown if g.ids[-1] != EOS][:beams]
        if most is not None and len(ended) >= most:
            break
        best = normalized([*ended, *alive[:1]], name)[: beams + 1]
        if not ahead and len(best) > beams and best[-1].ids == alive[0].ids:
            break
    return normalized(ended, name)[:beams]


def assert_found(outputs: Hypotheses, row: int, wanted: list[Scored]) -> None:
    """The row has the `wanted` hypotheses, and is empty after them."""
    ids, scores = np.zeros_like(outputs.ids[row]), np.full(outputs.scores.shape[1], -np.inf)
    for i, hypothesis in enumerate(wanted):
        ids[i, : len(hypothesis.ids)], scores[i] = hypothesis.ids, hypothesis.score
    np.testing.assert_array_equal(outputs.ids[row], ids)
    np.testing.assert_allclose(outputs.scores[row], scores, rtol=2e-5, atol=1e-6)


# ----- searches on the table


@pytest.mark.parametrize("name", LENGTH_PENALTIES)
def test_beam_as_wide_as_the_space_is_brute_force(name: str) -> None:
    sentences, lengths = range(10), [1, 2, 3, 4, 0] * 2
    beams = len(sequences(0, 4))
    assert beams == 1 + 3 + 9 + 27 + 81
    outputs = search(name, beams, 4, sentences, lengths)
    for row, (sentence, length) in enumerate(zip(sentences, lengths, strict=True)):
        everything = sequences(sentence, length) if length else []
        assert_found(outputs, row, normalized(everything, name))


@pytest.mark.parametrize("name", LENGTH_PENALTIES)
@pytest.mark.parametrize("beams", with_rare((2, 3), (2,)))
def test_beam_is_the_simple_one_that_never_stops_early(name: str, beams: int) -> None:
    sentences, lengths = range(40), [8, 3, 5, 1, 2] * 8
    outputs = search(name, beams, 8, sentences, lengths)
    for row, (sentence, length) in enumerate(zip(sentences, lengths, strict=True)):
        assert_found(outputs, row, simple_beam(sentence, beams, length, name))


@pytest.mark.parametrize("name", LENGTH_PENALTIES)
@pytest.mark.parametrize("count", with_rare((1, 2), (1,)))
def test_a_search_that_stops_finds_what_one_that_never_stops_finds(name: str, count: int) -> None:
    sentences, lengths = range(60), [12, 5, 9] * 20
    find = partial(search, name, 3, 12, sentences, lengths)
    outputs, whole = find(final(count)), find(never)
    for ours, theirs in zip(outputs, whole, strict=True):
        np.testing.assert_array_equal(ours[:, :count], theirs[:, :count])


@pytest.mark.parametrize("count", [1, 3])
def test_a_search_that_takes_the_first_hypotheses(count: int) -> None:
    sentences, lengths = range(40), [12, 5] * 20
    outputs = search("mean", 3, 12, sentences, lengths, early_stopping(count))
    wanted = [
        simple_beam(sentence, 3, length, "mean", most=count)
        for sentence, length in zip(sentences, lengths, strict=True)
    ]
    for row, hypotheses in enumerate(wanted):
        assert_found(outputs, row, hypotheses)
    whole = search("mean", 3, 12, sentences, lengths, never)
    assert np.any(outputs.ids[:, 0] != whole.ids[:, 0])


def test_a_search_without_lookahead_stops_where_none_is_better_as_it_is() -> None:
    sentences, lengths = range(40), [12, 5] * 20
    run = compiled(3, 12, final(3), lookahead=False)
    outputs = run(NAMES.index("mean"), start(sentences, 3), Sentences(jnp.array(lengths)))
    for row, (sentence, length) in enumerate(zip(sentences, lengths, strict=True)):
        assert_found(outputs, row, simple_beam(sentence, 3, length, "mean", ahead=False))
    for stop in (never, early_stopping(3)):
        others = search("mean", 3, 12, sentences, lengths, stop)
        assert np.any(outputs.ids != others.ids)


def test_greedy_takes_the_likeliest_word_and_is_a_beam_of_one() -> None:
    sentences, lengths = range(40), [8, 3, 5, 1, 0] * 8
    outputs, beam = (search("none", beams, 8, sentences, lengths) for beams in (0, 1))
    np.testing.assert_array_equal(outputs.ids, beam.ids)
    np.testing.assert_allclose(outputs.scores, beam.scores, rtol=1e-6)
    for row, (sentence, length) in enumerate(zip(sentences, lengths, strict=True)):
        best = Scored(0.0, ())
        while len(best.ids) < length and best.ids[-1:] != (EOS,):
            best = grow(sentence, best)[0]
        assert_found(outputs, row, [best] if length else [])


def test_greedy_scores_are_penalised_as_those_of_a_beam() -> None:
    plain, mean = (search(name, 0, 8, range(9), [5] * 9) for name in ("none", "mean"))
    length = np.sum(np.asarray(plain.ids) != PAD, axis=2)
    assert length.max() > 1
    np.testing.assert_allclose(np.asarray(mean.scores) * length, plain.scores, rtol=1e-6)


@pytest.mark.parametrize("beams", [0, 3])
def test_lengths_above_the_maximum_are_the_maximum(beams: int) -> None:
    outputs, wanted = (search("mean", beams, 4, range(9), [n] * 9) for n in (20, 4))
    jax.tree.map(np.testing.assert_array_equal, outputs, wanted)


def test_padding_is_never_chosen() -> None:
    def step(ids: Any, state: Any, index: Any) -> Any:
        logits = table_step(ids, state, index)[0]
        return logits.at[..., PAD].set(20.0), state, None

    sentences = Sentences(jnp.full(4, 3, jnp.int32))
    for beams in (0, 2):
        run = compiled(beams, 3, never, step)
        outputs = run(NAMES.index("none"), start(range(4), max(beams, 1)), sentences)
        assert (outputs.ids[:, :, 0] != PAD).all()
        assert jnp.isfinite(outputs.scores).all()


@pytest.fixture
def steps_of() -> Callable[..., Any]:
    """A function (beams, lengths, stop) -> (the positions at which the search has called its step,
    the hypotheses). Sentences end at position 2 (with a probability of 0.999) and at 4."""
    calls: list[int] = []

    def step(ids: Any, state: Any, index: Any) -> Any:
        jax.debug.callback(lambda i: calls.append(int(i)), index, ordered=True)
        last = jnp.array([2, 4])[:, None, None]
        going = jnp.array([-20.0, 4.0, -20.0, 5.0, -20.0]).reshape(1, 1, 5)
        ending = jnp.array([-20.0, 0.0, 9.0, 1.0, -20.0]).reshape(1, 1, 5)
        logits = jnp.where(index < last, going, ending)
        return jnp.broadcast_to(logits, (*ids.shape, 5)), state, None

    def run(beams: int, lengths: list[int], stop: Stop) -> tuple[list[int], Hypotheses]:
        calls.clear()
        find, state = compiled(beams, 30, stop, step), start(range(2), max(beams, 1))
        outputs = find(NAMES.index("gnmt 0.6"), state, Sentences(jnp.array(lengths)))
        jax.effects_barrier()
        return calls.copy(), outputs

    return run


@pytest.mark.parametrize("beams", (0, 1, 2))
def test_search_stops_when_every_sentence_is_done(beams: int, steps_of: Any) -> None:
    stop = optimal_stopping(max(beams, 1))
    calls, outputs = steps_of(beams, [30, 30], stop)
    assert calls == [0, 1, 2, 3, 4]
    assert outputs.ids[0, 0].tolist() == [3, 3, EOS] + [PAD] * 27
    assert outputs.ids[1, 0].tolist() == [3, 3, 3, 3, EOS] + [PAD] * 25
    assert steps_of(beams, [30, 0], stop)[0] == [0, 1, 2]
    assert steps_of(beams, [1, 2], stop)[0] == [0, 1]
    calls, nothing = steps_of(beams, [0, 0], stop)
    assert calls == []
    assert not nothing.ids.any()
    assert (nothing.scores == -jnp.inf).all()


def test_length_penalties() -> None:
    score, length = jnp.full(2, -6.0), jnp.array([1.0, 7.0])
    np.testing.assert_allclose(gnmt(0.6)(score, length), [-6.0, -6 / 2**0.6], rtol=1e-6)
    np.testing.assert_allclose(power(0.5)(score, length), [-6.0, -6 / 7**0.5], rtol=1e-6)
    np.testing.assert_allclose(reward(0.5)(score, length), [-5.5, -2.5], rtol=1e-6)
    np.testing.assert_allclose(unnormalized(score, length), [-6.0, -6.0])


# ----- searches with the model

LENGTHS = [(7, 1), (3, 1), (0, 0), (5, 1), (1, 1)]
BEAMS, LONGEST = 3, 8


@cache
def model_search(beams: int) -> Callable[[Any], Hypotheses]:
    """The search with a small model: source -> hypotheses of at most LONGEST words."""
    model, params = build(tiny())

    @jax.jit
    def run(params: Any, source: Any) -> Hypotheses:
        apply = partial(model.apply, {"params": params})
        state: Any = apply(source, max(beams, 1), LONGEST, method="prefill")
        step: Any = partial(apply, method="decode_step")

        sentences = Sentences(jnp.where(jnp.any(source != PAD, axis=1), LONGEST, 0))
        common = rules(LONGEST, power(1.0) if beams > 1 else unnormalized)
        return searches.search(strategy_of(beams, final(beams)), step, state, sentences, common)

    return lambda source: run(params, source)


@pytest.mark.optimized
def test_scores_are_those_of_the_model() -> None:
    source = make_batch(LENGTHS).source
    outputs = model_search(BEAMS)(source)
    ids = np.asarray(outputs.ids).reshape(-1, LONGEST)
    batch = Batch(np.repeat(source, BEAMS, axis=0), shift_right(ids), ids)
    logits, _ = forward(tiny())(batch)
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    chosen = np.take_along_axis(log_probs, ids[..., None], axis=2)[..., 0]
    length = (ids != PAD).sum(1)
    wanted = np.where(ids != PAD, chosen, 0).sum(1) / np.maximum(length, 1)
    wanted = np.where(length > 0, wanted, -np.inf).reshape(-1, BEAMS)
    np.testing.assert_allclose(outputs.scores, wanted, rtol=1e-4)
    assert (wanted[2] == -np.inf).all()
    assert np.isfinite(np.delete(wanted, 2, axis=0)).all()
    assert len({tuple(row) for row in ids[:BEAMS]}) == BEAMS


@pytest.mark.parametrize("beams", [0, BEAMS])
def test_order_and_width_of_the_batch_do_not_matter(beams: int) -> None:
    source = make_batch(LENGTHS).source
    outputs = model_search(beams)(source)
    turned = model_search(beams)(np.pad(source[::-1], [(0, 0), (0, 4)]))
    np.testing.assert_array_equal(turned.ids[::-1], outputs.ids)
    np.testing.assert_allclose(turned.scores[::-1], outputs.scores, rtol=1e-5)


# ----- words that must appear


def random_phrases(count: int) -> list[list[tuple[int, ...]]]:
    """Up to three phrases each, of at most four ids in all: they share, nest, overlap, repeat."""
    rng, rows = np.random.default_rng(0), list[list[tuple[int, ...]]]()
    while len(rows) < count:
        lengths = rng.integers(1, 4, rng.integers(0, 4))
        if lengths.sum() <= 4:
            rows.append([tuple(rng.choice([BOS, UNK, 4], n).tolist()) for n in lengths])
    return rows


def phrases_of(rows: list[list[tuple[int, ...]]]) -> Any:
    array = np.zeros((len(rows), 3, 3), np.int32)
    for row, phrases in enumerate(rows):
        for i, phrase in enumerate(phrases):
            array[row, i, : len(phrase)] = phrase
    return jnp.asarray(array)


def holds(ids: tuple[int, ...], phrases: list[tuple[int, ...]]) -> bool:
    present = [any(ids[i : i + len(p)] == p for i in range(len(ids))) for p in phrases]
    return all(present)


def search_holding(
    name: str, beams: int, max_length: int, lengths: Any, rows: list[list[tuple[int, ...]]]
) -> Hypotheses:
    """Searches on the table for outputs that hold the phrases of each row."""
    run = compiled(beams, max_length, final(beams), constraints=HOLD_PHRASES)
    sentences = Sentences(jnp.array(lengths), phrases=phrases_of(rows))
    return run(NAMES.index(name), start(range(len(rows)), beams), sentences)


@pytest.mark.parametrize("name", ["none", "mean"])
def test_a_wide_constrained_beam_is_brute_force(name: str) -> None:
    beams, rows, compared = len(sequences(0, 4)), random_phrases(40), 0
    outputs = search_holding(name, beams, 4, [4] * 40, rows)
    for row, phrases in enumerate(rows):
        best = normalized([s for s in sequences(row, 4) if holds(s.ids, phrases)], name)
        ids = np.asarray(outputs.ids[row]).tolist()
        for hypothesis, output, score in zip(best, ids, outputs.scores[row], strict=False):
            assert tuple(i for i in output if i) == hypothesis.ids
            np.testing.assert_allclose(score, hypothesis.score, rtol=2e-5, atol=1e-6)
        compared += 0 < len(best) < beams
    assert compared > 20


@pytest.mark.parametrize("beams", [5, 7])
def test_every_output_of_a_narrow_beam_holds_its_phrases(beams: int) -> None:
    """With one more than the phrases have ids, which is 5."""
    rows = random_phrases(100)
    outputs = search_holding("mean", beams, 8, [8] * 100, rows)
    for row, phrases in enumerate(rows):
        best = tuple(i for i in np.asarray(outputs.ids[row, 0]).tolist() if i)
        assert holds(best, phrases)
        if not phrases:
            assert_found(outputs, row, simple_beam(row, beams, 8, "mean"))


def likely_step(ids: Any, table: Any, index: Any) -> Any:
    """The logits are the row of the table at each position."""
    return jnp.broadcast_to(table[index], (*ids.shape, table.shape[1])), table, None


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("likely", "phrases"),
    [
        ("6867", ["67", "68"]),  # share their first id
        ("6668", ["668"]),  # overlaps itself
        ("678", ["67", "78"]),  # overlap each other
        ("4678", ["67", "467", "7"]),  # nest
        ("4677", ["67", "67"]),  # repeat
    ],
)
def test_a_likely_output_that_holds_the_phrases_stays(
    likely: str, phrases: list[str], turned: bool
) -> None:
    ids = [*map(int, likely), EOS]
    table = jnp.full((len(ids), 9), 0.0).at[jnp.arange(len(ids)), jnp.array(ids)].set(9.0)
    rows = [tuple(map(int, phrase)) for phrase in (reversed(phrases) if turned else phrases)]
    beams = sum(map(len, phrases)) + 1
    run = compiled(beams, len(ids), final(beams), likely_step, constraints=HOLD_PHRASES)
    sentences = Sentences(jnp.array([len(ids)]), phrases=phrases_of([rows]))
    output = run(NAMES.index("none"), table, sentences)
    assert np.asarray(output.ids[0, 0]).tolist() == ids
    assert output.log_probs[0, 0] > -0.02


def test_a_phrase_that_does_not_fit_is_left_out() -> None:
    outputs = search_holding("mean", 3, 8, [1, 2], [[(4, 3)], [(3,), (1,), (4,)]])
    one, two = (tuple(i for i in np.asarray(ids).tolist() if i) for ids in outputs.ids[:, 0])
    assert one == (4,)
    assert len({*two} & {3, 1, 4}) == 2
    assert np.isfinite(outputs.scores[:, 0]).all()
