"""Subword sampling: draws other segmentations of a text into the pieces of a SentencePiece model.

SentencePiece can sample too, but its random numbers differ between processes whatever the seed, so
that runs could neither be repeated nor resumed exactly.
"""

import importlib
import math
import re
import struct
import sys
from bisect import bisect
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain, count
from operator import add
from typing import Any

from transformer_jax.errors import UserError

# Numbers of SentencePiece's file format: types of models, and types of pieces.
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _USER_DEFINED, _BYTE = 1, 2, 4, 6

_LONGEST_CACHED = 24  # characters of a word
_CACHED_SEGMENTATIONS, _CACHED_LATTICES = 1 << 18, 1 << 16

Ids = tuple[int, ...]


class Sampler:
    """Samples segmentations of texts into pieces of `model`.

    BPE: each merge is dropped with a given probability (BPE-dropout, Provilkov et al. 2020). A
    dropped merge is not tried again, as in SentencePiece; in the paper it may be.
    Unigram: a segmentation is drawn with its probability to the power of alpha (Kudo 2018); the
    smaller alpha, the more uniform the distribution.

    UserError: the model is neither BPE nor unigram.
    """

    def __init__(self, model: bytes) -> None:
        proto = parse(model)
        kind, pieces = proto.trainer_spec.model_type, proto.pieces
        if kind not in (_UNIGRAM, _BPE):
            raise UserError("must be 0 for a model that is neither BPE nor unigram")
        self._segment = self._sample_bpe if kind == _BPE else self._sample_unigram
        self._ids = {each.piece: i for i, each in enumerate(pieces)}
        self._costs = {each.piece: -each.score for each in pieces if each.type == _NORMAL}
        self._unknown_cost = max(self._costs.values()) + 10.0  # as in SentencePiece
        self._longest = max(map(len, self._costs))
        self._raw = [
            bytes([int(each.piece[1:-1], 16)]) if each.type == _BYTE else each.piece.encode()
            for each in pieces
        ]
        self._bytes = {self._raw[i]: i for i, each in enumerate(pieces) if each.type == _BYTE}
        (self._unknown_id,) = (i for i, each in enumerate(pieces) if each.type == _UNKNOWN)
        symbols = [each.piece for each in pieces if each.type == _USER_DEFINED]
        longest_first = sorted(map(re.escape, symbols), key=len, reverse=True)
        # Words are segmented one by one, unless a piece may cross into the next word.
        across = any("▁" in text[1:] for text in self._costs)
        self._words = re.compile("(.+)" if across else "▁[^▁]*|[^▁]+", re.DOTALL)
        self._symbols = re.compile(f"({'|'.join(longest_first) or '(?!)'})")  # (?!): none matches
        self._merge_cached = lru_cache(_CACHED_SEGMENTATIONS)(self._merge_with_drops)
        self._lattice_cached = lru_cache(_CACHED_LATTICES)(self._lattice)

    def sample(self, ids: Sequence[int], sampling: float, key: str) -> list[int]:
        """Samples another segmentation of the text of `ids`, a function of the arguments alone.

        Ids are the model's own, without unknown pieces. `sampling` is the probability of dropping a
        merge, or alpha, above 0.

        UserError: a probability of 1 or above.
        """
        text = b"".join([self._raw[i] for i in ids]).decode()
        draws = _uniforms(key)
        sampled: list[int] = []
        for i, part in enumerate(self._symbols.split(text)):
            if i % 2:
                sampled.append(self._ids[part])
            else:
                sampled += self._segment(self._words.findall(part), sampling, draws)
        return sampled

    def _sample_bpe(self, words: list[str], rate: float, draws: Iterator[float]) -> list[int]:
        if rate >= 1:
            raise UserError("must be below 1 for a BPE model")
        scale = 1.0 / math.log1p(-rate)
        gaps = (int(math.log(1.0 - draw) * scale) for draw in draws)  # merges before each drop
        gap = next(gaps)
        ids: list[int] = []
        for word in words:
            if len(word) > _LONGEST_CACHED:
                pieces, merges, gap = self._merge(word, chain((gap,), gaps))
            else:
                drops: Ids = ()
                pieces, merges = self._merge_cached(word, drops)
                while merges > gap:
                    drops += (gap,)
                    gap = next(gaps)
                    pieces, merges = self._merge_cached(word, drops)
            gap -= merges
            ids += pieces
        return ids

    def _merge_with_drops(self, word: str, drops: Ids) -> tuple[Ids, int]:
        """Returns the ids, and the number of merges after the last drop; `drops` are all gaps."""
        return self._merge(word, chain(drops, (sys.maxsize,)))[:2]

    def _merge(self, word: str, gaps: Iterator[int]) -> tuple[Ids, int, int]:
        """Returns the ids of a word, the number of merges after the last drop, and the last gap.

        gaps: the numbers of merges before the first drop, between the first and the second, and so
        on.
        """
        parts = list(word)
        before, after = list(range(-1, len(word) - 1)), list(range(1, len(word) + 1))
        pairs = enumerate(map(add, parts, parts[1:]))
        candidates = [(self._costs[both], i, 2) for i, both in pairs if both in self._costs]
        heapify(candidates)
        gap, merges = next(gaps), 0
        while candidates:
            _, i, size = heappop(candidates)
            j = after[i]
            if not parts[i] or j == len(parts) or len(parts[i]) + len(parts[j]) != size:
                continue  # one of the two parts has since been merged with another
            if merges == gap:
                gap, merges = next(gaps), 0
                continue
            parts[i], parts[j] = parts[i] + parts[j], ""
            merges += 1
            after[i] = after[j]
            if after[i] < len(parts):
                before[after[i]] = i
            for left, right in ((before[i], i), (i, after[i])):
                if left >= 0 and right < len(parts):
                    both = parts[left] + parts[right]
                    if both in self._costs:
                        heappush(candidates, (self._costs[both], left, len(both)))
        return tuple(i for part in parts if part for i in self._spell(part)), merges, gap

    def _sample_unigram(self, words: list[str], alpha: float, draws: Iterator[float]) -> list[int]:
        ids: list[int] = []
        for word in words:
            lattice = self._lattice if len(word) > _LONGEST_CACHED else self._lattice_cached
            choices = lattice(word, alpha)
            start = 0
            while start < len(word):
                ends, sums = choices[start]
                end = ends[bisect(sums, next(draws) * sums[-1], hi=len(sums) - 1)]
                ids += self._spell(word[start:end])
                start = end
        return ids

    def _lattice(self, word: str, alpha: float) -> list[tuple[list[int], list[float]]]:
        """Returns, for each start in a word, the ends of the pieces that may begin there.

        The second list has the cumulative sums of their probabilities, not normalized.
        """
        rest = [0.0] * (len(word) + 1)  # log of the sum over all segmentations of the rest
        choices: list[Any] = [None] * len(word)
        for start in reversed(range(len(word))):
            ends = range(start + 1, min(start + self._longest, len(word)) + 1)
            ends = [end for end in ends if end == start + 1 or word[start:end] in self._costs]
            costs = [self._costs.get(word[start:end], self._unknown_cost) for end in ends]
            logs = [rest[end] - alpha * cost for end, cost in zip(ends, costs, strict=True)]
            top = max(logs)
            sums = list(accumulate(math.exp(log - top) for log in logs))
            rest[start] = top + math.log(sums[-1])
            choices[start] = ends, sums
        return choices

    def _spell(self, part: str) -> Ids:
        """Returns the id of a piece, or for a character that is no piece the ids of its bytes."""
        if part in self._costs:
            return (self._ids[part],)
        if not self._bytes:
            return (self._unknown_id,)
        return tuple(self._bytes[bytes([byte])] for byte in part.encode())


def _uniforms(key: str) -> Iterator[float]:
    """Yields uniform numbers in [0, 1) without end. Hashes make a new key cost almost nothing."""
    for block in count():
        words = struct.unpack("<8Q", blake2b(f"{key} {block}".encode()).digest())
        for word in words:
            yield (word >> 11) * 2.0**-53


def without_prefix(model: bytes) -> bytes:
    """Returns a model that keeps the spaces of a text, and adds none at its beginning."""
    proto = parse(model)
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    return proto.SerializeToString()


def parse(model: bytes) -> Any:
    """Returns a SentencePiece model as a message of protocol buffers."""
    # Its classes are made when it is imported, unknown to type checkers.
    module: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    return module.ModelProto.FromString(model)
