"""Other ways to cut a text into the pieces of a SentencePiece model, for subword sampling.

SentencePiece samples too, but its random numbers differ from process to process whatever the seed:
with them no run could be repeated, or resumed as if it had never stopped.
"""

from __future__ import annotations

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
from typing import Any, NamedTuple

_UNIGRAM, _BPE = 1, 2  # kinds of models and of pieces, as SentencePiece's files number them
_NORMAL, _UNKNOWN, _USER_DEFINED, _BYTE = 1, 2, 4, 6
_SHORT = 24  # characters of the longest word that is kept in memory
_CUTS, _WORDS = 1 << 18, 1 << 16  # ways to cut words, and words, that are kept

Ids = tuple[int, ...]


class Piece(NamedTuple):
    """A piece of a model; `kind` as SentencePiece's files number it."""

    text: str
    score: float
    kind: int


class Sampler:
    """Cuts texts anew into pieces of `model`. ValueError: it is neither BPE nor unigram.

    BPE: each merge is left out with a given probability (BPE-dropout, Provilkov et al. 2020; once
    for all, as in SentencePiece, where the paper may come back to a merge within the word).
    Unigram: a draw from all ways to cut the text, of probabilities to the power of alpha (Kudo
    2018); the smaller alpha, the more random.
    """

    def __init__(self, model: bytes) -> None:
        kind, pieces = read(model)
        if kind not in (_UNIGRAM, _BPE):
            raise ValueError("must be 0 for a model that is neither BPE nor unigram")
        self._draw = self._drop_merges if kind == _BPE else self._draw_pieces
        self._ids = {piece.text: i for i, piece in enumerate(pieces)}
        self._costs = {piece.text: -piece.score for piece in pieces if piece.kind == _NORMAL}
        self._unknown_cost = max(self._costs.values()) + 10.0  # as SentencePiece has it
        self._longest = max(map(len, self._costs))
        self._raw = [
            bytes([int(piece.text[1:-1], 16)]) if piece.kind == _BYTE else piece.text.encode()
            for piece in pieces
        ]
        self._bytes = {self._raw[i]: i for i, piece in enumerate(pieces) if piece.kind == _BYTE}
        (self._unknown_id,) = (i for i, piece in enumerate(pieces) if piece.kind == _UNKNOWN)
        symbols = [piece.text for piece in pieces if piece.kind == _USER_DEFINED]
        longest_first = sorted(map(re.escape, symbols), key=len, reverse=True)
        # Words are cut one by one, unless a piece goes on into the next word.
        across = any("▁" in text[1:] for text in self._costs)
        self._words = re.compile("(.+)" if across else "▁[^▁]*|[^▁]+", re.DOTALL)
        self._symbols = re.compile(f"({'|'.join(longest_first)})") if symbols else None
        self._merged = lru_cache(_CUTS)(self._merge_short)
        self._weighed = lru_cache(_WORDS)(self._weigh)

    def sample(self, ids: Sequence[int], sampling: float, key: str) -> list[int]:
        """Another way to cut the text of `ids`, a function of the arguments alone.

        Ids are the model's own, without unknown pieces. `sampling`: the probability of leaving a
        merge out, or alpha; above 0. ValueError: a probability of 1 or above.
        """
        text = b"".join([self._raw[i] for i in ids]).decode()
        draws = _uniforms(key)
        if self._symbols is None:
            return self._draw(self._words.findall(text), sampling, draws)
        found: list[int] = []
        for i, part in enumerate(self._symbols.split(text)):
            if i % 2:
                found.append(self._ids[part])
            else:
                found += self._draw(self._words.findall(part), sampling, draws)
        return found

    def _drop_merges(self, words: list[str], rate: float, draws: Iterator[float]) -> list[int]:
        if rate >= 1:
            raise ValueError("must be below 1 for a BPE model")
        scale = 1.0 / math.log1p(-rate)
        gaps = (int(math.log(1.0 - draw) * scale) for draw in draws)  # merges before each drop
        left = next(gaps)
        ids: list[int] = []
        for word in words:
            if len(word) > _SHORT:
                found, made, left = self._merge(word, chain((left,), gaps))
            else:
                drops: Ids = ()
                found, made = self._merged(word, drops)
                while made > left:
                    drops += (left,)
                    left = next(gaps)
                    found, made = self._merged(word, drops)
            left -= made
            ids += found
        return ids

    def _merge_short(self, word: str, drops: Ids) -> tuple[Ids, int]:
        """`_merge` with given gaps: the ids, and the merges after the last drop."""
        return self._merge(word, chain(drops, (sys.maxsize,)))[:2]

    def _merge(self, word: str, gaps: Iterator[int]) -> tuple[Ids, int, int]:
        """The ids of a word, the merges after the last drop and the last gap.

        gaps: how many merges are made before the first drop, between it and the second, and so on.
        """
        parts = list(word)
        before, after = list(range(-1, len(word) - 1)), list(range(1, len(word) + 1))
        ready = [
            (self._costs[both], i, 2)
            for i, both in enumerate(map(add, parts, parts[1:]))
            if both in self._costs
        ]
        heapify(ready)
        gap, made = next(gaps), 0
        while ready:
            _, i, size = heappop(ready)
            j = after[i]
            if not parts[i] or j == len(parts) or len(parts[i]) + len(parts[j]) != size:
                continue  # one of the two has been merged with another
            if made == gap:
                gap, made = next(gaps), 0
                continue
            parts[i], parts[j] = parts[i] + parts[j], ""
            made += 1
            after[i] = after[j]
            if after[i] < len(parts):
                before[after[i]] = i
            for left, right in ((before[i], i), (i, after[i])):
                if left >= 0 and right < len(parts):
                    both = parts[left] + parts[right]
                    if both in self._costs:
                        heappush(ready, (self._costs[both], left, len(both)))
        return tuple(i for part in parts if part for i in self._spell(part)), made, gap

    def _draw_pieces(self, words: list[str], alpha: float, draws: Iterator[float]) -> list[int]:
        ids: list[int] = []
        for word in words:
            choices = (self._weigh if len(word) > _SHORT else self._weighed)(word, alpha)
            at = 0
            while at < len(word):
                ends, shares = choices[at]
                end = ends[bisect(shares, next(draws) * shares[-1], hi=len(shares) - 1)]
                ids += self._spell(word[at:end])
                at = end
        return ids

    def _weigh(self, word: str, alpha: float) -> list[tuple[list[int], list[float]]]:
        """For each place in a word, the ends of the pieces that may follow, cumulative shares."""
        rest = [0.0] * (len(word) + 1)  # log of the sum over all ways to go on
        choices: list[Any] = [None] * len(word)
        for at in reversed(range(len(word))):
            ends = range(at + 1, min(at + self._longest, len(word)) + 1)
            ends = [end for end in ends if end == at + 1 or word[at:end] in self._costs]
            costs = [self._costs.get(word[at:end], self._unknown_cost) for end in ends]
            logs = [rest[end] - alpha * cost for end, cost in zip(ends, costs, strict=True)]
            top = max(logs)
            shares = list(accumulate(math.exp(log - top) for log in logs))
            rest[at] = top + math.log(shares[-1])
            choices[at] = ends, shares
        return choices

    def _spell(self, part: str) -> Ids:
        """The id of a piece, or those of the bytes of a character that is none."""
        if part in self._costs:
            return (self._ids[part],)
        if not self._bytes:
            return (self._unknown_id,)
        return tuple(self._bytes[bytes([byte])] for byte in part.encode())


def _uniforms(key: str) -> Iterator[float]:
    """Numbers from 0 up to 1 without end: hashes, so that starting anew costs next to nothing."""
    for block in count():
        words = struct.unpack("<8Q", blake2b(f"{key} {block}".encode()).digest())
        for word in words:
            yield (word >> 11) * 2.0**-53


def read(model: bytes) -> tuple[int, list[Piece]]:
    """A SentencePiece model's kind and pieces."""
    kind, pieces = _UNIGRAM, []
    for number, value in _fields(model):
        if number == 1:
            piece = dict(_fields(value))
            (score,) = struct.unpack("<f", piece.get(2, bytes(4)))
            pieces.append(Piece(piece[1].decode(), score, piece.get(3, _NORMAL)))
        elif number == 2:
            kind = dict(_fields(value)).get(3, _UNIGRAM)
    return kind, pieces


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The numbers and values of the fields of a message in Protocol Buffers' wire format."""
    at = 0

    def integer() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        number, wire = divmod(integer(), 8)
        if wire == 0:
            yield number, integer()
        else:
            size = {1: 8, 5: 4}.get(wire) or integer()
            yield number, message[at : at + size]
            at += size
