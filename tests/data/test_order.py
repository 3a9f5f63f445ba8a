"""The order in which training draws pairs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from transformer_jax.config import DataConfig
from transformer_jax.data.order import (
    Drawn,
    Order,
    describe_mixture,
    make_order,
    permuted,
    random_order,
    shares_of,
)

KEY = np.uint64(0x1234_5678_9ABC_DEF0)


COUNTS = [*range(1, 40), *(2**i + j for i in (6, 9, 13) for j in (-1, 0, 1)), 10_000]


@pytest.mark.parametrize("counts", [COUNTS, pytest.param(range(4_001), marks=pytest.mark.slow)])
def test_permutations_by_index_are_bijective(counts: Sequence[int]) -> None:
    for count in counts:
        places = permuted(np.arange(count), count, np.full(count, KEY))
        assert np.array_equal(np.sort(places), np.arange(count))


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_all_permutations_are_about_as_frequent(count: int) -> None:
    keys = random_order(30_000, 1).astype(np.uint64)
    places = [permuted(np.full(len(keys), i), count, keys) for i in range(count)]
    frequency = Counter(zip(*(place.tolist() for place in places), strict=True))
    assert len(frequency) == math.factorial(count)
    mean = len(keys) / len(frequency)
    assert max(abs(n - mean) for n in frequency.values()) < 0.3 * mean


def config(*names: str, **changes: Any) -> DataConfig:
    return DataConfig(train=names or ("grammar",), **changes)


def drawn(order: Order, chunk: int, first: int, last: int) -> Drawn:
    """The chunks from `first` to `last`, of `chunk` pairs each."""
    parts = [order.draw(i, i * chunk, (i + 1) * chunk) for i in range(first, last)]
    return Drawn(*(np.concatenate(each) for each in zip(*parts, strict=True)))


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000, 5000])
def test_every_pair_is_drawn_once_in_a_pass(size: int) -> None:
    order = make_order([size], config(), 3)
    assert order.epoch == size
    epochs = [order.draw(i, i * size, (i + 1) * size) for i in range(3)]
    for number, (pairs, passes) in enumerate(epochs):
        assert np.array_equal(np.sort(pairs), np.arange(size))
        assert set(passes.tolist()) == {number}
    if size > 200:
        for one, other in itertools.combinations([pairs for pairs, _ in epochs], 2):
            assert np.mean(one == other) < 0.05
        other = make_order([size], config(), 4).draw(0, 0, size)
        assert np.mean(other.pairs == epochs[0][0]) < 0.05


def test_chunks_consist_of_blocks_of_neighbors() -> None:
    size = 256 * 400 + 19
    order = make_order([size], config(), 0)
    chunks = [order.draw(i, i * 25_600, min((i + 1) * 25_600, size)).pairs for i in range(5)]
    assert np.array_equal(np.sort(np.concatenate(chunks)), np.arange(size))
    for pairs in chunks[:-1]:
        neighbors = np.diff(np.sort(pairs)) == 1
        assert 1 - np.mean(neighbors) < 101 / 25_600  # at most a hundred blocks
        assert np.mean(np.diff(pairs) == 1) < 0.01  # shuffled
        assert np.corrcoef(pairs, np.arange(25_600))[0, 1] < 0.05
        assert abs(np.mean(pairs) / size - 0.5) < 0.15  # from the whole corpus


def test_billions_of_pairs_take_no_memory() -> None:
    order = make_order([10**12], config(), 0)
    pairs, passes = order.draw(10**7, 10**12 + 65_536 * 7, 10**12 + 65_536 * 8)
    assert len(np.unique(pairs)) == 65_536
    assert pairs.min() >= 0
    assert 0.9 * 10**12 < pairs.max() < 10**12
    assert set(passes.tolist()) == {1}


def test_corpora_are_mixed_by_their_weights() -> None:
    sizes, names = [1000, 10, 7], ("large.tsv", "small.tsv", "never.tsv")
    order = make_order(sizes, config(*names, weights=(3.0, 1.0, 0.0)), 0)
    assert order.epoch == 1010
    chunks = [drawn(order, 101, 10 * i, 10 * i + 10) for i in range(4)]
    pairs, passes = (np.concatenate(each) for each in zip(*chunks, strict=True))
    counts = np.bincount(pairs, minlength=1017)
    assert counts[:1000].sum() == int(4040 * Fraction(3, 4))
    assert counts[1000:1010].sum() == 1010
    assert counts[1010:].sum() == 0
    # No pair is drawn twice more often than another one of its corpus.
    assert set(counts[:1000].tolist()) == {3, 4}
    assert set(counts[1000:1010].tolist()) == {101}
    assert Counter(zip(pairs.tolist(), passes.tolist(), strict=True)).most_common(1)[0][1] == 1
    for i in range(40):  # in each chunk
        small = order.draw(i, i * 101, (i + 1) * 101).pairs >= 1000
        assert 25 <= small.sum() <= 26


@pytest.mark.long
@given(st.lists(st.tuples(st.integers(1, 70), st.integers(0, 9)), min_size=1, max_size=5))
@example([(40, 1), (25, 1)])
@example([(1, 1), (1, 1), (15, 8)])
@settings(deadline=None, max_examples=50)
def test_no_chunk_of_a_mixture_is_empty(corpora: list[tuple[int, int]]) -> None:
    sizes, weights = zip(*corpora, strict=True)
    assume(any(weights))
    mixture = config(*(f"{i}.tsv" for i in range(len(sizes))), weights=tuple(map(float, weights)))
    order = make_order(sizes, mixture, 0)
    epochs, end = 6, 0
    for number in range(order.chunks(16) * epochs):
        start, stop = order.bounds(number, 16)
        assert start == end
        assert 0 < stop - start < 16 + len(sizes)
        assert len(order.draw(number, start, stop).pairs) > 0
        end = stop
    assert end == epochs * order.epoch


def test_a_temperature_draws_more_of_the_small() -> None:
    names = ("a.tsv", "b.tsv")
    assert shares_of([300, 100], config(*names)) is None
    assert shares_of([300, 100], config(*names, temperature=1.0)) == pytest.approx([0.75, 0.25])
    even = shares_of([10_000, 100], config(*names, temperature=2.0))
    assert even == pytest.approx([10 / 11, 1 / 11])
    assert (shares_of([3, 1, 0], config(*names, "c.tsv", temperature=5.0)) or [])[2] == 0
    said = r"data\.weights=\(1\.0, 1\.0\): must be 0 for b\.tsv"
    with pytest.raises(ValueError, match=said):
        shares_of([300, 0], config(*names, weights=(1.0, 1.0)))


def test_the_mixture_is_described() -> None:
    assert describe_mixture([300], config()) == []
    mixed = config("a.tsv", "b.tsv", weights=(1.0, 1.0))
    assert describe_mixture([300, 100], mixed) == [
        "corpus a.tsv: 300 pairs, 50.0% of those drawn, each 0.667 times an epoch",
        "corpus b.tsv: 100 pairs, 50.0% of those drawn, each 2 times an epoch",
    ]
