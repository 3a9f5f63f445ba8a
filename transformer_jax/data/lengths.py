"""How many pairs of a corpus have which lengths."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Lengths(NamedTuple):
    """The lengths of pairs, by the length of the longer side, from 0 to the longest."""

    counts: Int[np.ndarray, " L"]  # of pairs
    widest: Int[np.ndarray, "L 2"]  # longest source and longest target among them

    @classmethod
    def of(cls, lengths: Int[np.ndarray, "P 2"]) -> Lengths:
        """Returns the lengths of these pairs (source, target)."""
        longer = lengths.max(axis=1, initial=0)
        counts = np.bincount(longer, minlength=1)
        widest = np.zeros((len(counts), 2), int)
        np.maximum.at(widest, longer, lengths)
        return cls(counts, widest)

    def joined(self, other: Lengths) -> Lengths:
        """Returns the lengths of the pairs of both."""
        shorter, longer = sorted((self, other), key=lambda lengths: len(lengths.counts))
        counts, widest = longer.counts.copy(), longer.widest.copy()
        counts[: len(shorter.counts)] += shorter.counts
        widest[: len(shorter.counts)] = np.maximum(widest[: len(shorter.counts)], shorter.widest)
        return Lengths(counts, widest)

    def longest(self) -> Int[np.ndarray, " 2"]:
        """Returns the length of the longest source and of the longest target."""
        return self.widest.max(axis=0)
