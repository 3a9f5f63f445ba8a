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
