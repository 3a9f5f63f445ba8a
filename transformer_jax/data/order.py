"""The order in which training draws the pairs of its corpora.

The order is computed from the index of a pair in the order, so its memory does not grow with the
corpora. A chunk of consecutive indices is what the loader plans together.

The pairs of a corpus are drawn in passes. A pass begins at a random pair, cuts the
corpus into blocks of 256 neighbors, which lie together on the disk, and permutes the blocks. The
pairs after the last whole block come last. Each chunk is then shuffled. If corpora are mixed, each
of them has passes of its own, and a chunk takes from each in proportion to its share.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64, UInt64

from transformer_jax.config import DataConfig

VERSION = 2
"""The version of this order, which run cards name."""

_BLOCK = 256
_ROUNDS = 8  # of a Feistel network
BATCHES, _PASSES, _CHUNK = 2, 3, 4
"""What is random: the order of a chunk's batches, a pass, and the order of a chunk's pairs."""


class Drawn(NamedTuple):
    """Pairs in the order in which they are drawn."""

    pairs: Int[np.ndarray, " Q"]
    passes: Int[np.ndarray, " Q"]  # how often each one has been drawn before


class Order:
    """The order of the pairs. epoch: their number in an epoch, that of all corpora with a share."""

    def __init__(self, sizes: Sequence[int], shares: Sequence[Fraction], seed: int) -> None:
        self._sizes, self._shares, self._seed = sizes, shares, seed
        self._starts = np.cumsum([0, *sizes]).tolist()
        self.epoch = sum(size for size, share in zip(sizes, shares, strict=True) if share)
        self._drawn_from = sum(1 for share in shares if share)  # number of corpora

    def chunks(self, size: int) -> int:
        """Returns the number of chunks of an epoch, each of `size` pairs.

        The last one has the rest. A rest of fewer pairs than there are corpora is part of the chunk
        before it: all shares of it may round down to nothing.
        """
        return -(-(self.epoch - self._drawn_from + 1) // size)

    def bounds(self, number: int, size: int) -> tuple[int, int]:
        """Returns the first index of chunk `number`, counted over all epochs, and that after it."""
        count = self.chunks(size)
        epoch, index = divmod(number, count)
        stop = self.epoch if index + 1 == count else (index + 1) * size
        return epoch * self.epoch + index * size, epoch * self.epoch + stop

    def draw(self, number: int, start: int, stop: int) -> Drawn:
        """Returns the pairs with the indices from `start` to `stop`, which are chunk `number`."""
        parts = [
            _pass(self._sizes[i], self._seed, i, int(start * share), int(stop * share))
            for i, share in enumerate(self._shares)
        ]
        pairs = np.concatenate([part.pairs + self._starts[i] for i, part in enumerate(parts)])
        passes = np.concatenate([part.passes for part in parts])
        order = random_order(len(pairs), self._seed, _CHUNK, number)
        return Drawn(pairs[order], passes[order])


def make_order(sizes: Sequence[int], config: DataConfig, seed: int) -> Order:
    """Returns the order for corpora with these numbers of pairs."""
    shares = shares_of(sizes, config)
    if shares is None:
        return Order([sum(sizes)], [Fraction(1)], seed)
    return Order(sizes, shares, seed)


def shares_of(sizes: Sequence[int], config: DataConfig) -> list[Fraction] | None:
    """Returns the fraction of all pairs that are drawn from each corpus; None: each pair once.

    UserError: a corpus with a weight has no pair.
    """
    weights = config.weights
    if config.temperature is not None:
        # Six digits, since machines differ in the last digit of a power.
        powers = [(size / max(sizes)) ** (1 / config.temperature) for size in sizes]
        weights = [float(f"{power:.6g}") for power in powers]
    if weights is None:
        return None
    for name, size, weight in zip(config.train, sizes, weights, strict=True):
        want = f"0 for {name}, of which no pair is used"
        config.require(size > 0 or not weight, "weights", want)
    exact = [Fraction(weight) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def describe_mixture(sizes: Sequence[int], config: DataConfig) -> list[str]:
    """Returns a line on each corpus of several: its pairs, its share and how often it is used."""
    if len(sizes) < 2:
        return []
    shares = shares_of(sizes, config) or [Fraction(size, sum(sizes)) for size in sizes]
    epoch = sum(size for size, share in zip(sizes, shares, strict=True) if share)
    return [
        f"corpus {name}: {size:,} pairs, {float(share):.1%} of those drawn"
        + (f", each {float(epoch * share / size):.3g} times an epoch" if size else "")
        for name, size, share in zip(config.train, sizes, shares, strict=True)
    ]


def _pass(size: int, seed: int, corpus: int, start: int, stop: int) -> Drawn:
    """Returns the pairs with the indices from `start` to `stop` in the passes of a corpus."""
    passes, index = np.divmod(np.arange(start, stop, dtype=np.int64), size)
    root = np.random.SeedSequence((seed, _PASSES, corpus)).generate_state(1, np.uint64)
    keys = _mix(root + _mix(passes.astype(np.uint64)))
    block, place = np.divmod(index, _BLOCK)
    whole = size // _BLOCK  # blocks; the pairs after them come last
    moved = block < whole
    block[moved] = permuted(block[moved], whole, keys[moved])
    first = (_mix(keys) % np.array(size, np.uint64)).astype(np.int64)
    return Drawn((first + block * _BLOCK + place) % size, passes)


def permuted(
    index: Int64[np.ndarray, " Q"], count: int, key: UInt64[np.ndarray, " Q"]
) -> Int64[np.ndarray, " Q"]:
    """Returns the place of each index, below `count`, in the permutation that its key names.

    A Feistel network permutes the smallest square power of two that holds `count`; its output is
    permuted again until it is below `count` (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains", section 3).
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    values = index.astype(np.uint64)
    left = np.arange(len(values))  # indices of values that are to be permuted once more
    while len(left):
        high, low = values[left] >> half, values[left] & mask
        for number in range(_ROUNDS):
            mixed = _mix(key[left] + _mix(low + (np.uint64(number) << np.uint64(32))))
            high, low = low, high ^ (mixed & mask)
        values[left] = high << half | low
        left = left[values[left] >= np.uint64(count)]
    return values.astype(np.int64)


def random_order(count: int, *key: int) -> Int[np.ndarray, " P"]:
    """Returns a random permutation that is the same function of `key` in every NumPy version."""
    words = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(words, kind="stable")


def _mix(words: UInt64[np.ndarray, " Q"]) -> UInt64[np.ndarray, " Q"]:
    """Returns a hash of each word (the output function of SplitMix64, Steele et al. 2014)."""
    words = words + np.array([0x9E3779B97F4A7C15], np.uint64)
    words = (words ^ (words >> np.uint64(30))) * np.array([0xBF58476D1CE4E5B9], np.uint64)
    words = (words ^ (words >> np.uint64(27))) * np.array([0x94D049BB133111EB], np.uint64)
    return words ^ (words >> np.uint64(31))
