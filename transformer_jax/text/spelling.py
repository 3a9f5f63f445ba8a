"""Spells the pieces of a vocabulary with those of another one."""

from collections.abc import Sequence
from typing import NamedTuple

from transformer_jax.special_ids import BOS, EOS, PAD, UNK
from transformer_jax.text.subwords import without_prefix
from transformer_jax.text.tokenizer import Tokenizer, is_byte

_SPECIAL = sorted((PAD, BOS, EOS, UNK))


class Spelling(NamedTuple):
    """How the pieces of a new vocabulary are spelled with those of an old one."""

    ids: list[list[int]]  # for each new id the old ones; one if both have the piece
    taken: int  # number of pieces that both have, special ids included
    dropped: int  # number of pieces that only the old one has

    def __str__(self) -> str:
        made = len(self.ids) - self.taken
        return f"{self.taken:,} pieces taken, {made:,} made from others, {self.dropped:,} dropped"


def spell(new: Tokenizer, old: Tokenizer) -> Spelling:
    """Returns how the pieces of `new` are spelled in the vocabulary of `old`.

    A piece that `old` has stands for itself, and so do the special ids. Of another one, `old`
    tokenizes the text, which begins with a space only if the piece does. `UNK` stands for a byte
    that `old` does not have, and for text that it removes.
    """
    first = len(_SPECIAL)
    known = dict(zip(_pieces(old), range(first, old.size), strict=True))
    within_words = Tokenizer(without_prefix(old.model))
    ids = [[id] for id in _SPECIAL]
    for piece in _pieces(new):
        text = "" if is_byte(piece) else piece.replace("▁", " ")
        ids.append([known[piece]] if piece in known else within_words.encode(text) or [UNK])
    taken = first + len(known.keys() & {*_pieces(new)})
    return Spelling(ids, taken, old.size - taken)


def _pieces(tokenizer: Tokenizer) -> Sequence[str]:
    """Returns the pieces without the special ids, which are the first."""
    return tokenizer.pieces(range(len(_SPECIAL), tokenizer.size))
