"""Shapes of batches, and sentences of similar length together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from transformer_jax.data.buckets import Lengths, Shape, batches_by_length, choose_shapes


@pytest.mark.parametrize("count", [1, 2, 3, 5, 40])
def test_shapes_waste_the_least(count: int) -> None:
    rng = np.random.default_rng(count)
    lengths = (2 + rng.poisson(4, (200, 2)) + rng.integers(0, 3, (200, 1))).astype(np.int32)
    shapes = choose_shapes(Lengths.of(lengths), 1000, count)
    longer = lengths.max(axis=1)

    def slots(bounds: tuple[int, ...]) -> int:
        return int(np.array(bounds)[np.searchsorted(bounds, longer)].sum())

    levels = np.unique(longer).tolist()
    ways = itertools.combinations(levels[:-1], min(count, len(levels)) - 1)
    best = min(slots((*way, levels[-1])) for way in ways)
    assert slots(tuple(max(shape.source, shape.target) for shape in shapes)) == best
    assert len(shapes) == min(count, len(levels))


def test_shapes_are_as_narrow_as_their_pairs_and_nested() -> None:
    lengths = np.array([[2, 3], [3, 2], [9, 5], [4, 10]] * 9, np.int32)
    assert choose_shapes(Lengths.of(lengths), 100, 2) == (Shape(32, 3, 3), Shape(8, 9, 10))
    assert choose_shapes(Lengths.of(lengths), 100, 1) == (Shape(8, 9, 10),)


@pytest.mark.parametrize("side", [0, 1])
def test_a_batch_must_hold_its_longest_pairs(side: int) -> None:
    lengths = np.array([[5, 5], [5, 5]], np.int32)
    lengths[1, side] = 40
    said = r"data\.batch_tokens=319: must be at least 320 to hold 8 sentences of 40 tokens"
    with pytest.raises(ValueError, match=said):
        choose_shapes(Lengths.of(lengths), 319, 4)
    assert choose_shapes(Lengths.of(lengths), 320, 4)[-1].rows == 8


def test_sentences_are_batched_by_length() -> None:
    lengths = [9, 0, 3, 60, 50, 9, 1, 12, 55, 9, 10, 2]
    batches = list(batches_by_length(lengths, batch_tokens=96, max_length=60, devices=3))
    assert batches == [
        ((6, 16), [6, 11, 2, 0]),
        ((6, 16), [5, 9, 10, 7]),
        ((3, 60), [4]),
        ((3, 60), [8]),
        ((3, 60), [3]),
    ]
    # Two that do not fill a batch join those of the next width.
    batches = list(batches_by_length([3, 4, 20, 21, 22], batch_tokens=64, max_length=60))
    assert batches == [((2, 32), [0, 1]), ((2, 32), [2, 3]), ((1, 32), [4])]
