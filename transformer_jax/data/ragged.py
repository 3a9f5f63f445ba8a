"""Rows of ids of different lengths."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64


def _in_memory(_: str, __: Int[np.ndarray, " N"]) -> None:
    pass


class Ragged(NamedTuple):
    """Rows of different lengths in one array: row i is ids[offsets[i] : offsets[i + 1]].

    check: called with "ids" or "offsets" and the indices there that are about to be read; raises an
    error if a file that holds the array is damaged there.
    """

    ids: Int32[np.ndarray, " N"]
    offsets: Int64[np.ndarray, " P+1"]
    check: Callable[[str, Int[np.ndarray, " N"]], None] = _in_memory

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
        return self.take(np.array([index])).ids

    def lengths(self) -> Int32[np.ndarray, " P"]:
        """Returns the length of each row."""
        return self.lengths_of(np.arange(len(self.offsets) - 1))

    def lengths_of(self, rows: Int[np.ndarray, " Q"]) -> Int32[np.ndarray, " Q"]:
        """Returns the lengths of the rows with these indices."""
        starts, ends = self._bounds(rows)
        return (ends - starts).astype(np.int32)

    def take(self, rows: Int[np.ndarray, " Q"] | Bool[np.ndarray, " P"]) -> Ragged:
        """Returns the rows with these indices, or those where `rows` is true, copied to memory."""
        starts, ends = self._bounds(np.flatnonzero(rows) if rows.dtype == bool else rows)
        offsets = np.concatenate([[0], np.cumsum(ends - starts)])
        indices = np.repeat(starts - offsets[:-1], ends - starts) + np.arange(offsets[-1])
        self.check("ids", indices)
        return Ragged(np.asarray(self.ids[indices]), offsets)

    def _bounds(
        self, rows: Int[np.ndarray, " Q"]
    ) -> tuple[Int64[np.ndarray, " Q"], Int64[np.ndarray, " Q"]]:
        """Returns where these rows start and end."""
        self.check("offsets", rows)
        self.check("offsets", rows + 1)
        return self.offsets[rows], self.offsets[rows + 1]
