"""Batches, positions, packing and the background thread."""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial, reduce
from typing import Any

import numpy as np
import pytest
from common import Patch
from corpus_files import small_tokenizers

from transformer_jax.config import Config, DataConfig, ModelConfig, TokenizerConfig, TrainConfig
from transformer_jax.data import loader as data
from transformer_jax.data.buckets import Lengths, Shape
from transformer_jax.data.dataset import Examples, Report
from transformer_jax.data.loader import Loaded, Loader, Shard, evaluation_batches
from transformer_jax.data.order import Drawn
from transformer_jax.data.ragged import Ragged
from transformer_jax.special_ids import BOS, EOS, PAD
from transformer_jax.types import Batch

Rows = list[tuple[tuple[int, ...], tuple[int, ...]]]


def examples_of(rows: Rows) -> Examples:
    source, target = (Ragged.of(side) for side in zip(*rows, strict=True))
    return Examples(source, target, small_tokenizers(), Report(len(rows), 0, 0, 0))


@cache
def examples(count: int = 300, longest: int = 20) -> Examples:
    """Distinct pairs of random lengths; the first id is the pair's number."""
    rng = random.Random(0)

    def side(number: int) -> tuple[int, ...]:
        length = min(longest - 2, int(rng.expovariate(0.2)))
        return (100 + number, *(rng.randint(4, 99) for _ in range(length)), EOS)

    return examples_of([(side(i), side(i)) for i in range(count)])


@cache
def text_examples(count: int = 60) -> Examples:
    """Pairs that the tokenizer made of text, so that subwords can be sampled."""
    encode = small_tokenizers().source.encode
    lines = [f"the {i} dogs of number" + " of" * (i % 5) for i in range(count)]
    return examples_of([((*encode(line), EOS), (*encode(line[::-1]), EOS)) for line in lines])


def config(
    sampling: float = 0.0, seed: int = 0, start_id: int | None = BOS, **changes: Any
) -> Config:
    small: dict[str, Any] = {"batch_tokens": 320, "shapes": 4, "packed_length": 40}
    return Config(
        model=ModelConfig(decoder_start_id=start_id),
        tokenizer=TokenizerConfig(sampling=sampling),
        data=DataConfig(**(small | changes)),
        train=TrainConfig(steps=1, seed=seed),
    )


def packed_pairs(batch: Batch) -> int:
    """How many pairs the rows of a packed batch hold."""
    assert batch.source_segments is not None
    return int(batch.source_segments.max(axis=1).sum())


def pairs_in(batch: Batch) -> Rows:
    """The pairs of a batch, packed or not, after checking everything around them."""
    pairs: Rows = []
    segments: list[Any] = [batch.source_segments, batch.target_segments]
    if batch.source_segments is None:
        segments = [np.int32(batch.source != PAD), np.int32(batch.target_out != PAD)]
    source_segments, target_segments = segments
    for row in range(len(batch.source)):
        assert source_segments[row].max() == target_segments[row].max()
        for segment in range(1, source_segments[row].max() + 1):
            at_source = np.flatnonzero(source_segments[row] == segment)
            at_target = np.flatnonzero(target_segments[row] == segment)
            positions = batch.source_positions, batch.target_positions
            for at, marks in zip((at_source, at_target), positions, strict=True):
                assert np.array_equal(at, at[0] + np.arange(len(at)))
                assert marks is None or np.array_equal(marks[row, at], np.arange(len(at)))
            source = batch.source[row, at_source].tolist()
            target_in = batch.target_in[row, at_target].tolist()
            target_out = batch.target_out[row, at_target].tolist()
            assert target_in == [BOS, *target_out[:-1]]
            pairs.append((tuple(source), tuple(target_out)))
    assert all(array is None or array.dtype == np.int32 for array in batch)
    for array in (batch.target_in, batch.target_segments, batch.target_positions):
        assert array is None or not array[batch.target_out == PAD].any()
    for array in (batch.source_segments, batch.source_positions):
        assert array is None or not array[batch.source == PAD].any()
    return pairs


def pairs_of(examples: Examples) -> Rows:
    pairs = [examples.pair(i) for i in range(len(examples))]
    return [(tuple(source.tolist()), tuple(target.tolist())) for source, target in pairs]


def take(loader: Loader, count: int, position: int = 0) -> list[tuple[int, Batch]]:
    return list(map(placed, itertools.islice(loader.batches(position), count)))


def placed(loaded: Loaded) -> tuple[int, Batch]:
    """The position of the batch after the one that is loaded, and this one."""
    return loaded.after, loaded.batch


def epoch_of(loader: Loader, position: int = 0) -> list[tuple[int, Batch]]:
    """The rest of the epoch that `position` is in."""
    batches = []
    for loaded in loader.batches(position):
        batches.append(placed(loaded))
        assert loaded.epoch == loader.epoch(loaded.after)
        if loaded.epoch > loader.epoch(position):
            return batches
    raise AssertionError("batches end")


def filled(batch: Batch) -> list[np.ndarray]:
    """The arrays of a batch that are not None."""
    return [array for array in batch if array is not None]


def same(one: list[tuple[int, Batch]], other: list[tuple[int, Batch]]) -> bool:
    return len(one) == len(other) and all(
        a == b and all(map(np.array_equal, filled(p), filled(q)))
        for (a, p), (b, q) in zip(one, other, strict=True)
    )


# Batches


def test_packed_rows_must_hold_the_longest_pair() -> None:
    with pytest.raises(ValueError, match=r"data\.packed_length=19: must be at least 20"):
        Loader(examples(), config(packing=True, packed_length=19))
    with pytest.raises(ValueError, match=r"data\.batch_tokens=320: must be at least 328"):
        Loader(examples(), config(packing=True, packed_length=41))


LAYOUTS = [{}, {"packing": True}, {"shapes": 1}, {"batch_tokens": 5000}]


@pytest.mark.parametrize("changes", LAYOUTS)
@pytest.mark.parametrize("window", [65_536, 70])
def test_every_pair_once_an_epoch(changes: dict[str, Any], window: int, monkeypatch: Patch) -> None:
    monkeypatch.setattr(data, "CHUNK", window)
    loader = Loader(examples(), config(seed=3, **changes))
    wanted = Counter(pairs_of(examples()))
    position, orders = 0, []
    for epoch in range(3):
        assert loader.epoch(position) == epoch
        batches = epoch_of(loader, position)
        orders.append([pair for _, batch in batches for pair in pairs_in(batch)])
        assert Counter(orders[-1]) == wanted
        assert all((*b.source.shape, b.target_out.shape[1]) in loader.shapes for _, b in batches)
        position = batches[-1][0]
    assert orders[0] != orders[1] != orders[2]
    if window == 65_536:
        assert loader.batches_per_epoch == len(epoch_of(loader))
        assert loader.non_padding_fraction == pytest.approx(
            sum(len(s) + len(t) for s, t in wanted)
            / sum(b.source.size + b.target_out.size for _, b in epoch_of(loader))
        )
    else:
        assert abs(loader.batches_per_epoch - len(epoch_of(loader))) <= 5


@pytest.mark.parametrize("changes", LAYOUTS[:2])
@pytest.mark.parametrize("sampling", [0.0, 0.3])
def test_batches_of_mixed_corpora_are_counted(
    changes: dict[str, Any], sampling: float, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(data, "CHUNK", 25)
    mixed = dataclasses.replace(text_examples(), sizes=(50, 10))
    decode = small_tokenizers().source.decode
    large = {decode(pair[0]) for pair in pairs_of(text_examples())[:50]}
    names = {"train": ("large.tsv", "small.tsv"), "weights": (1.0, 1.0)}

    def make() -> Loader:
        return Loader(mixed, config(sampling, **changes, **names))

    batches = list(itertools.islice(make().batches(), 30))
    for loaded in batches:
        texts = [decode(source) for source, _ in pairs_in(loaded.batch)]
        wanted = (sum(text in large for text in texts), sum(text not in large for text in texts))
        assert loaded.drawn == wanted
    total = np.sum([loaded.drawn for loaded in batches], axis=0)
    assert abs(total[0] - total[1]) <= 0.1 * total.sum()
    if sampling:  # a pair has other subwords whenever it is drawn, also within an epoch
        every = [source for loaded in batches for source, _ in pairs_in(loaded.batch)]
        sources = [source for source in every if decode(source) not in large]
        assert len({*sources}) > 1.3 * 10 * total.sum() / len(mixed)
    for done in (1, 7, 20):
        again = list(itertools.islice(make().batches(batches[done - 1].after), 5))
        assert [item.drawn for item in again] == [item.drawn for item in batches[done : done + 5]]
        assert same([*map(placed, again)], [*map(placed, batches[done : done + 5])])


def test_pairs_go_into_the_smallest_shape_or_fill_the_next() -> None:
    loader = Loader(examples(), config())
    batches = [batch for _, batch in epoch_of(loader)]
    partial = [batch for batch in batches if not batch.source[:, 0].all()]
    assert len(partial) <= 1
    assert all(batch.source.shape[1] == loader.shapes[-1].source for batch in partial)
    for below, shape in itertools.pairwise(loader.shapes):
        smaller = sum(
            len(source) <= below.source and len(target) <= below.target
            for batch in batches
            if batch.source.shape[1:] == (shape.source,)
            for source, target in pairs_in(batch)
        )
        assert smaller < below.rows


@pytest.mark.parametrize("changes", LAYOUTS[:2])
@pytest.mark.parametrize("sampling", [0.0, 0.3])
def test_batches_are_a_function_of_seed_and_position(
    changes: dict[str, Any], sampling: float, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(data, "CHUNK", 25)

    def make(seed: int) -> Loader:
        return Loader(text_examples(), config(sampling, seed, **changes))

    whole = take(make(5), 40)
    assert make(5).epoch(whole[-1][0]) > 1
    assert same(whole, take(make(5), 40))
    assert not same(whole, take(make(6), 40))
    ids = [make(seed)._first[0].source.ids.tolist() for seed in (5, 6)]
    assert Counter(ids[0]) != Counter(ids[1])
    for done in (1, 2, 5, 11, 26):
        assert same(take(make(5), 40 - done, whole[done - 1][0]), whole[done:])


def test_resuming_reads_one_window(monkeypatch: Patch) -> None:
    monkeypatch.setattr(data, "CHUNK", 70)
    loader = Loader(examples(), config())
    windows: list[int] = []
    read = Loader._read
    monkeypatch.setattr(Loader, "_read", lambda self, n: windows.append(n) or read(self, n))
    batches = loader.batches((7 * 5 + 3) << 20 | 1)
    loaded = next(batches)
    assert loaded.after == (7 * 5 + 3) << 20 | 2
    assert loaded.name == "epoch 7, chunk 3, batch 1"
    batches.close()
    assert {*windows} <= {38, 39}


@pytest.mark.parametrize("changes", LAYOUTS[:2])
def test_devices_and_processes_only_add_and_share_rows(changes: dict[str, Any]) -> None:
    """The rows of a process need not follow each other, as on TPU slices of several hosts."""

    def batches(*shard: Any) -> list[tuple[int, Batch]]:
        return take(Loader(examples(), config(**changes), Shard(*shard)), 12)

    alone, twelve, apart = batches(), batches(12), batches(12, ([0, 3], 4))
    quarters = [batches(12, ([i], 4)) for i in range(4)]
    every = zip(alone, twelve, apart, *quarters, strict=True)
    for (position, batch), (other, wide), (_, ends), *rest in every:
        assert {position} == {other, *(part for part, _ in rest)}
        parts = [filled(part) for _, part in rest]
        arrays = zip(filled(batch), filled(wide), filled(ends), *parts, strict=True)
        for array, more, outer, *shares in arrays:
            assert len(more) == -(-len(array) // 12) * 12
            assert np.array_equal(more[: len(array)], array)
            assert not more[len(array) :].any()
            assert np.array_equal(np.concatenate(shares), more)
            assert np.array_equal(np.concatenate([shares[0], shares[3]]), outer)


@pytest.mark.parametrize("changes", LAYOUTS[:2])
def test_processes_share_the_sampling(changes: dict[str, Any], monkeypatch: Patch) -> None:
    """Each pair is sampled once, lengths are gathered in the thread that takes batches, and the
    batches are those of one process. The last chunk has fewer pairs than there are processes."""
    monkeypatch.setattr(data, "CHUNK", 25)
    sampled_config = config(0.3, 5, **changes)
    alone = take(Loader(text_examples(52), sampled_config, Shard(12)), 40)
    sampled: Counter[tuple[int, int]] = Counter()
    sample = Examples.sample

    def count(self: Examples, drawn: Drawn, *others: Any) -> Examples:
        sampled.update(zip(drawn.passes.tolist(), drawn.pairs.tolist(), strict=True))
        return sample(self, drawn, *others)

    monkeypatch.setattr(Examples, "sample", count)
    barrier, arrays = threading.Barrier(3), [np.zeros(0)] * 3

    def run(index: int) -> tuple[int, list[tuple[int, Batch]]]:
        thread = threading.get_ident()

        def gather(array: np.ndarray) -> np.ndarray:
            assert threading.get_ident() == thread
            arrays[index] = array
            barrier.wait(20)
            whole = np.concatenate(arrays)
            barrier.wait(20)
            return whole

        shard = Shard(12, ([index], 3), (index, 3), gather)
        loader = Loader(text_examples(52), sampled_config, shard)
        return len(loader._first[0]), take(loader, 40)

    with ThreadPoolExecutor(3) as pool:
        held, thirds = zip(*pool.map(run, range(3)), strict=True)
    assert sum(held) == 25  # each process holds the pairs of its rows
    for (position, batch), *rest in zip(alone, *thirds, strict=True):
        assert {position} == {other for other, _ in rest}
        shares = zip(*(filled(part) for _, part in rest), strict=True)
        for array, share in zip(filled(batch), shares, strict=True):
            assert np.array_equal(np.concatenate(share), array)
    assert set(sampled.values()) == {1}
    assert {pair for epoch, pair in sampled if epoch == 0} == {*range(52)}


@pytest.mark.parametrize(("start_id", "wanted"), [(7, 7), (None, PAD)])
def test_the_decoder_starts_with_the_id_it_is_told(start_id: int | None, wanted: int) -> None:
    for _, batch in take(Loader(examples(), config(start_id=start_id)), 5):
        used = batch.target_out[:, 0] != PAD
        assert (batch.target_in[used, 0] == wanted).all()
        assert not batch.target_in[~used].any()


def test_packing_puts_several_pairs_into_a_row() -> None:
    loader = Loader(examples(1200), config(packing=True))
    assert loader.shapes == (Shape(8, 40, 40),)
    assert loader.non_padding_fraction > 0.9
    # Batches are alike: rows are not sorted by the lengths of what they hold.
    counts = [packed_pairs(batch) for _, batch in epoch_of(loader)]
    assert np.mean(counts) > 4 * 8
    assert np.std(counts) < 0.3 * np.mean(counts)


def test_sampled_batches_hold_the_same_text(monkeypatch: Patch) -> None:
    monkeypatch.setattr(data, "CHUNK", 25)
    loader = Loader(text_examples(), config(0.3))
    plain = pairs_of(text_examples())
    decode = small_tokenizers().source.decode

    def text(rows: Rows) -> Counter[tuple[str, str]]:
        return Counter((decode(source), decode(target)) for source, target in rows)

    first = [pair for _, batch in epoch_of(loader) for pair in pairs_in(batch)]
    position = epoch_of(loader)[-1][0]
    second = [pair for _, batch in epoch_of(loader, position) for pair in pairs_in(batch)]
    assert text(first) == text(second) == text(plain)
    assert len({*first} & {*plain}) < 30  # those too long for every shape
    assert len({*first} - {*second}) > 30
    other = Loader(text_examples(), config(0.3, 1))
    assert len({*first} - {pair for _, batch in epoch_of(other) for pair in pairs_in(batch)}) > 30
    assert max(len(source) for source, _ in first) <= max(len(source) for source, _ in plain)


def test_a_pair_outside_the_first_window_may_be_the_longest(monkeypatch: Patch) -> None:
    monkeypatch.setattr(data, "CHUNK", 25)
    encode = small_tokenizers().source.encode
    pair = (*encode("of number " * 6), EOS), (*encode("rebmun fo " * 6), EOS)
    every = examples_of([*pairs_of(text_examples()), pair])
    for seed in range(3):
        loader = Loader(every, config(0.1, seed, batch_tokens=1000))
        assert sum(len(pairs_in(batch)) for _, batch in epoch_of(loader)) == len(every)


def test_batches_of_all_shapes_are_mixed() -> None:
    widths = [batch.source.shape[1] for _, batch in epoch_of(Loader(examples(1200), config()))]
    changes = sum(a != b for a, b in itertools.pairwise(widths))
    assert len({*widths}) == 4
    assert changes > 15


def test_sampled_lengths_choose_the_shapes() -> None:
    plain = Loader(text_examples(), config(batch_tokens=1000))
    sampled = Loader(text_examples(), config(0.3, batch_tokens=1000))
    assert sampled.shapes[-1] == plain.shapes[-1]
    assert sampled.shapes != plain.shapes
    lengths = np.array([len(s) for _, b in epoch_of(sampled) for s, _ in pairs_in(b)])
    assert lengths.mean() > plain.examples.source.lengths().mean() + 1


def test_evaluation_has_every_pair_once_whatever_the_budget() -> None:
    for tokens in (320, 100):  # of 100 the longest pairs need more
        batches = list(evaluation_batches(examples(), config(batch_tokens=tokens, packing=True)))
        pairs = Counter(pair for batch in batches for pair in pairs_in(batch))
        assert pairs == Counter(pairs_of(examples()))
        assert len({batch.source.shape + batch.target_out.shape for batch in batches}) <= 4
        assert all(batch.source_segments is None for batch in batches)
    batches = partial(evaluation_batches, examples(), config(start_id=EOS))
    shared = [list(batches(Shard(3, ([i], 3)))) for i in range(3)]
    for batch, *parts in zip(batches(Shard(3)), *shared, strict=True):
        assert np.array_equal(batch.target_in, np.concatenate([part.target_in for part in parts]))
        assert batch.target_in[0, 0] == EOS


def test_development_sets_share_their_shapes() -> None:
    sets = [examples(), examples(200, 9), text_examples()]
    lengths = reduce(Lengths.joined, (each.lengths for each in sets))
    shapes = set()
    for each in sets:
        batches = list(evaluation_batches(each, config(), lengths=lengths))
        shapes |= {batch.source.shape + batch.target_out.shape for batch in batches}
        pairs = Counter(pair for batch in batches for pair in pairs_in(batch))
        assert pairs == Counter(pairs_of(each))
    assert len(shapes) <= config().data.shapes


@pytest.mark.parametrize("changes", LAYOUTS[:2])
def test_a_chunk_is_planned_once(changes: dict[str, Any], monkeypatch: Patch) -> None:
    monkeypatch.setattr(data, "CHUNK", 70)
    planned: list[bytes] = []

    def recorded(plan: Callable[..., Any]) -> Callable[..., Any]:
        return lambda lengths, shapes: planned.append(lengths.tobytes()) or plan(lengths, shapes)

    monkeypatch.setattr(data.buckets, "pack", recorded(data.buckets.pack))
    monkeypatch.setattr(data.buckets, "group", recorded(data.buckets.group))
    loader = Loader(examples(), config(**changes))
    assert loader.non_padding_fraction > 0
    assert loader.batches_per_epoch > 0
    epoch_of(loader)
    assert len(planned) == len({*planned}) >= 5


def test_tiny_corpora() -> None:
    one = examples_of([((100, EOS), (101, EOS))])
    for changes in LAYOUTS:
        loader = Loader(one, config(**changes))
        assert loader.batches_per_epoch == 1
        assert [position for position, _ in take(loader, 3)] == [1 << 20, 2 << 20, 3 << 20]
        assert pairs_in(take(loader, 1)[0][1]) == [((100, EOS), (101, EOS))]


# The background thread


def test_prefetch_gives_the_items_and_works_ahead() -> None:
    yielded: list[int] = []

    def items() -> Iterator[int]:
        for i in range(6):
            yielded.append(i)
            yield i

    ahead = data.prefetch(items(), size=2)
    assert next(ahead) == 0
    deadline = time.time() + 10
    while len(yielded) < 3 and time.time() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert yielded == [0, 1, 2]  # one given, two ready
    assert list(ahead) == [1, 2, 3, 4, 5]


def test_prefetch_passes_errors_on() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("lost")

    before = threading.active_count()
    ahead = data.prefetch(items())
    assert next(ahead) == 1
    with pytest.raises(KeyError, match="lost"):
        next(ahead)
    assert threading.active_count() == before


@pytest.mark.parametrize("used", [0, 1, 9])
def test_prefetch_leaves_no_thread(used: int) -> None:
    before = threading.active_count()
    ahead = Loader(examples(), config()).batches()
    for _ in range(used):
        next(ahead)
    assert threading.active_count() == before + (2 if used else 0)
    ahead.close()
    assert threading.active_count() == before
