"""Subword sampling: the ways to cut a text and how often each is drawn."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import sentencepiece
from corpus_files import sentencepiece_model

from transformer_jax.text import subwords
from transformer_jax.text.subwords import Sampler, parse

SYLLABLES = ["ba", "dog", "en", "ste", "mi", "ö"]
WORDS = ["".join(parts) for parts in itertools.product(SYLLABLES, repeat=3)]
TEXT = [f"the {WORDS[i * i % 216]} of number {i}, {WORDS[i % 216]}" for i in range(600)]
DRAWS = 3000


@cache
def model(kind: str = "bpe", **options: Any) -> bytes:
    options = {"vocab_size": 340, "byte_fallback": True, **options}
    return sentencepiece_model(TEXT, model_type=kind, **options)


def processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def draws(model: bytes, text: str, rate: float) -> Counter[tuple[int, ...]]:
    sampler, ids = Sampler(model), processor(model).encode(text)
    return Counter(tuple(sampler.sample(ids, rate, str(i))) for i in range(DRAWS))


def assert_drawn(counts: Counter[Any], wanted: Mapping[Any, float]) -> None:
    """Each way is found as often as its probability says, within 4.5 standard deviations."""
    assert sum(wanted.values()) == pytest.approx(1)
    assert {*counts} <= {*wanted}
    for way, share in wanted.items():
        spread = math.sqrt(share * (1 - share) / DRAWS)
        assert abs(counts[way] / DRAWS - share) < 4.5 * spread + 1e-9, (way, share)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("bpe", {}),
    ("unigram", {}),
    ("bpe", {"user_defined_symbols": "dog,dogs,r▁4"}),
    ("unigram", {"user_defined_symbols": "dog,dogs,r▁4"}),
    ("bpe", {"split_by_whitespace": False}),
    ("unigram", {"split_by_whitespace": False}),
    ("bpe", {"treat_whitespace_as_suffix": True}),
    ("bpe", {"byte_fallback": False, "vocab_size": 120}),
    ("bpe", {"add_dummy_prefix": False, "remove_extra_whitespaces": False}),
]


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_without_chance_it_is_sentencepiece(kind: str, options: dict[str, Any]) -> None:
    trained = model(kind, **options)
    sampler, inner = Sampler(trained), processor(trained)
    rate = 1e-12 if kind == "bpe" else 1e3
    strange = ["", "dogsdog dogs", "  r 4  the", "é" if inner.is_byte(5) else "e", "the\n"]
    for line in [*TEXT[::7], *strange]:
        ids = inner.encode(line)
        sampled = sampler.sample(ids, rate, line)
        if kind == "unigram":  # there may be several best ways
            best = sum(map(inner.get_score, ids))
            assert sum(map(inner.get_score, sampled)) == pytest.approx(best)
        else:
            assert sampled == ids


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_samples_hold_the_text(kind: str, options: dict[str, Any]) -> None:
    trained = model(kind, **options)
    sampler, inner = Sampler(trained), processor(trained)
    for line in TEXT[::7]:
        ids = inner.encode(line)
        sampled = [sampler.sample(ids, 0.1, str(i)) for i in range(20)]
        assert len({*map(tuple, sampled)}) > 2
        assert {inner.decode(way) for way in sampled} == {inner.decode(ids)}


@pytest.mark.parametrize("short", [24, 0])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_bpe_drops_each_merge_with_the_given_probability(
    rate: float, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subwords, "_LONGEST_CACHED", short)
    inner = processor(model())
    costs = {inner.id_to_piece(i): -inner.get_score(i) for i in range(259, inner.get_piece_size())}

    def ways(parts: tuple[str, ...], dropped: frozenset[Any] = frozenset()) -> dict[Any, float]:
        """Probabilities of all outcomes, by the definition."""
        ends = [0, *itertools.accumulate(map(len, parts))]
        merges = sorted(
            (costs[both], i)
            for i, both in enumerate(map("".join, itertools.pairwise(parts)))
            if both in costs and (ends[i], ends[i + 1], ends[i + 2]) not in dropped
        )
        if not merges:
            return {parts: 1.0}
        _, i = merges[0]
        merged = (*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :])
        chances: dict[Any, float] = defaultdict(float)
        kept = ways(parts, dropped | {(ends[i], ends[i + 1], ends[i + 2])})
        for share, more in ((1 - rate, ways(merged, dropped)), (rate, kept)):
            for way, probability in more.items():
                chances[way] += share * probability
        return chances

    for word in ("▁number", "▁badogste", "▁mimi"):
        text = word[1:]
        wanted = {tuple(map(inner.piece_to_id, way)): p for way, p in ways(tuple(word)).items()}
        assert len(wanted) > 3
        assert_drawn(draws(model(), text, rate), wanted)


def test_words_of_a_text_are_drawn_one_by_one() -> None:
    one, two = (draws(model(), word, 0.2) for word in ("dog", "mimi"))
    both = draws(model(), "dog mimi", 0.2)
    ways = {(*a, *b): one[a] * two[b] / DRAWS**2 for a in one for b in two if one[a] * two[b] > 1e5}
    assert len(ways) > 3
    for way, share in ways.items():
        assert both[way] / DRAWS == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_unigram_draws_by_probability(rate: float) -> None:
    inner = processor(model("unigram"))
    for text in ("mi", "badogste", "ömibaba"):
        ways = {tuple(way) for way in inner.nbest_encode(text, nbest_size=400)}
        weights = {way: math.exp(rate * sum(map(inner.get_score, way))) for way in ways}
        total = sum(weights.values())
        assert len(ways) > 2
        wanted = {way: weight / total for way, weight in weights.items()}
        assert_drawn(draws(model("unigram"), text, rate), wanted)


def test_long_words_are_no_burden() -> None:
    for kind in ("bpe", "unigram"):
        ids = processor(model(kind)).encode("dogs" * 500)
        sampled = Sampler(model(kind)).sample(ids, 0.1, "")
        assert processor(model(kind)).decode(sampled) == "dogs" * 500


def test_a_model_is_read_as_sentencepiece_reads_it() -> None:
    for kind, number in (("unigram", 1), ("bpe", 2)):
        trained = model(kind, user_defined_symbols="dog")
        inner = processor(trained)
        proto = parse(trained)
        pieces = proto.pieces
        assert proto.trainer_spec.model_type == number
        assert [p.piece for p in pieces] == [*map(inner.id_to_piece, range(inner.get_piece_size()))]
        for i, piece in enumerate(pieces):
            assert piece.score == pytest.approx(inner.get_score(i))
            assert (piece.type == 6) == inner.is_byte(i)
            assert (piece.type == 3) == inner.is_control(i)
        assert [piece.piece for piece in pieces if piece.type == 4] == ["dog"]
