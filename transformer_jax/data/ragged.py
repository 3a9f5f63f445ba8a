"""Rows of ids of different lengths."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64


class Ragged(NamedTuple):
    """Rows of different lengths in one array: row i is ids[offsets[i] : offsets[i + 1]]."""

    ids: Int32[np.ndarray, " N"]
    offsets: Int64[np.ndarray, " P+1"]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """Returns the concatenation of `rows`."""
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return cls(np.fromiter(itertools.chain.from_iterable(rows), np.int32), offsets)

    @classmethod
    def of_lengths(cls, ids: Int32[np.ndarray, " N"], lengths: Int32[np.ndarray, " P"]) -> Ragged:
        """Returns the rows of these lengths whose concatenation is `ids`."""
        return cls(ids, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))

    def row(self, index: int) -> Int32[np.ndarray, " N"]:
        """Returns the ids of one row."""
        return np.array(self.ids[self.offsets[index] : self.offsets[index + 1]])

    @property
    def size(self) -> int:
        """The number of rows."""
        return len(self.offsets) - 1

    def lengths(self) -> Int32[np.ndarray, " P"]:
        """Returns the length of each row."""
        return np.diff(self.offsets).astype(np.int32)

    def lengths_of(self, rows: Int[np.ndarray, " Q"]) -> Int32[np.ndarray, " Q"]:
        """Returns the lengths of the rows with these indices."""
        return (self.offsets[rows + 1] - self.offsets[rows]).astype(np.int32)

    def take(self, rows: Int[np.ndarray, " Q"] | Bool[np.ndarray, " P"]) -> Ragged:
        """Returns the rows with these indices, or those where `rows` is true, copied to memory."""
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows
        starts, lengths = self.offsets[rows], self.lengths_of(rows)
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        indices = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Ragged(np.asarray(self.ids[indices]), offsets)


class Parts(NamedTuple):
    """The rows of several `Ragged`, one after the other, without a copy."""

    parts: tuple[Ragged, ...]

    @property
    def size(self) -> int:
        """The number of rows."""
        return sum(part.size for part in self.parts)

    def row(self, index: int) -> Int32[np.ndarray, " N"]:
        """Returns the ids of one row."""
        return self.take(np.array([index])).row(0)

    @property
    def ids(self) -> Int32[np.ndarray, " N"]:
        """The ids of all rows, copied to memory."""
        return np.concatenate([part.ids for part in self.parts])

    def lengths(self) -> Int32[np.ndarray, " P"]:
        """Returns the length of each row."""
        return np.concatenate([part.lengths() for part in self.parts])

    def lengths_of(self, rows: Int[np.ndarray, " Q"]) -> Int32[np.ndarray, " Q"]:
        """Returns the lengths of the rows with these indices."""
        lengths = np.zeros(len(rows), np.int32)
        for part, here, inner in self._split(rows):
            lengths[here] = part.lengths_of(inner)
        return lengths

    def take(self, rows: Int[np.ndarray, " Q"]) -> Ragged:
        """Returns the rows with these indices, copied to memory."""
        split = self._split(rows)
        taken = Parts(tuple(part.take(inner) for part, _, inner in split))
        order = np.argsort(np.concatenate([here for _, here, _ in split]))
        return Ragged.of_lengths(taken.ids, taken.lengths()).take(order)

    def _split(
        self, rows: Int[np.ndarray, " Q"]
    ) -> list[tuple[Ragged, Int[np.ndarray, " _"], Int[np.ndarray, " _"]]]:
        """Returns for each part which of the `rows` are in it, and their indices in it."""
        ends = np.cumsum([part.size for part in self.parts])
        part_of = np.searchsorted(ends, rows, side="right")
        which = [np.flatnonzero(part_of == i) for i in range(len(self.parts))]
        return [
            (part, here, rows[here] - (end - part.size))
            for part, here, end in zip(self.parts, which, ends.tolist(), strict=True)
        ]
