"""Alignments of words or pieces from attention weights, in the Pharaoh format."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

Weights = Float[np.ndarray, "T S"]

END = "</s>"
"""The piece of the end symbol."""

Alignment = list[tuple[int, int]]
"""Pairs (index in the source, index in the target), by target."""


def align(weights: Weights) -> Alignment:
    """Returns for each token of the target the token of the source with the largest weight."""
    if weights.shape[1] == 0:
        return []
    return [(int(source), target) for target, source in enumerate(weights.argmax(axis=1))]


def word_weights(
    weights: Weights, source: Sequence[str], target: Sequence[str]
) -> Float[np.ndarray, "V W"]:
    """Returns the weights of words, from those of their pieces.

    A word of the source has the sum of the weights of its pieces, and a word of the target the mean
    over its pieces. A piece that starts with `▁` begins a word.
    """
    starts = _starts(target)
    if not starts:
        return weights
    columns = np.add.reduceat(weights, _starts(source), axis=1)
    sizes = np.diff([*starts, len(target)])
    return np.add.reduceat(columns, starts, axis=0) / sizes[:, None]


def align_pieces(
    attention: Weights, source: Sequence[str], target: Sequence[str], *, words: bool = True
) -> Alignment:
    """Returns the alignment of words, or of pieces, without the end symbols.

    attention: weights of the ids of `source` and `target`, which are pieces with end symbols.
    """
    source, target = ([p for p in pieces if p != END] for pieces in (source, target))
    weights = attention[: len(target), : len(source)]
    return align(word_weights(weights, source, target) if words else weights)


def pharaoh(alignment: Alignment) -> str:
    """Returns an alignment as text, such as `0-0 2-1 1-2`."""
    return " ".join(f"{source}-{target}" for source, target in alignment)


def _starts(pieces: Sequence[str]) -> list[int]:
    """Returns the indices of the pieces that begin a word."""
    return [i for i, piece in enumerate(pieces) if i == 0 or piece.startswith("▁")]
