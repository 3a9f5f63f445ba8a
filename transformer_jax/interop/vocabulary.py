"""SentencePiece models with the ids of another file, as those of OPUS-MT and Hugging Face need."""

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from transformer_jax.errors import UserError
from transformer_jax.special_ids import UNK
from transformer_jax.text.subwords import parse
from transformer_jax.text.tokenizer import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_BPE = 2
"""Types of pieces and of models in SentencePiece's file format."""

LANGUAGE = re.compile(">>.+<<")
"""A piece at the beginning of a source that names the language to translate into."""

_BOS, _EOS, _UNK, _PAD = "<s>", "</s>", "<unk>", "<pad>"


class Vocabulary(NamedTuple):
    """A tokenizer, and how many of its model's ids the model of another framework has."""

    tokenizer: Tokenizer
    size: int

    def rows(
        self, name: str, table: Float[np.ndarray, "V *D"], new: float | None = None
    ) -> Float[np.ndarray, "W *D"]:
        """Returns a table of the other model with the rows of our ids.

        new: the values of ids that the other model lacks; None: 0 for special ids, and the row of
        <unk> for pieces, which the other model reads as <unk>. UserError: the table has another
        size.
        """
        if len(table) != self.size:
            raise UserError(f"{name}: has {len(table)} rows; must be {self.size}, one for each id")
        ids = np.asarray(self.tokenizer.model_ids)
        rows = table[np.where(ids < self.size, ids, ids[UNK])]
        rows[ids < 0] = 0
        if new is not None:
            rows[(ids < 0) | (ids >= self.size)] = new
        return rows


def numbered(models: Mapping[str, bytes], ids: Any) -> list[Vocabulary]:
    """Returns vocabularies that segment like SentencePiece models, with these ids of their pieces.

    They have the same ids. Pieces that a model lacks are only decoded, but for names of languages,
    which are one token each. Pieces of a model that have no id follow behind those that have; a
    target is spelled without them, since the other model never predicts them.

    models: those of "source", "target" or both. ids: the id of each piece, as read from a file.
    UserError: a model is none of SentencePiece, or the ids do not count from 0, or lack </s> or
    <unk>.
    """
    entries = chain.from_iterable(ids.items()) if isinstance(ids, dict) else [None]
    if not all(type(each) in (str, int) for each in entries):
        raise UserError("must hold the id of each piece")
    if sorted(map(str, ids.values())) != sorted(map(str, range(len(ids)))):
        raise UserError("the ids of the pieces must be different and count from 0")
    if missing := {_EOS, _UNK} - {*ids}:
        raise UserError(f"has no piece {min(missing)}")
    names = dict.fromkeys(sorted(map(str, ids), key=lambda name: int(ids[name])))
    languages = {f"▁{name}" for name in names if LANGUAGE.fullmatch(name)}
    for model in models.values():
        Tokenizer(model)  # checks it
        names |= dict.fromkeys(name for name in _own_pieces(parse(model)) if name not in languages)
    return [
        Vocabulary(_with_pieces(model, [*names], len(ids) if side == "target" else None), len(ids))
        for side, model in models.items()
    ]


def _own_pieces(proto: Any) -> dict[str, Any]:
    """Returns the pieces of a model by their text, without its special symbols."""
    return {each.piece: each for each in proto.pieces if each.type not in (_UNKNOWN, _CONTROL)}


def _with_pieces(model: bytes, names: Sequence[str], used: int | None) -> Tokenizer:
    """Returns the tokenizer of a model with these pieces, of which it uses the first ones."""
    proto = parse(model)
    old = _own_pieces(proto)
    # So low that BPE merges nothing into such a piece before all merges of its own.
    lowest = min(each.score for each in old.values()) - 1
    unused = lowest if proto.trainer_spec.model_type == _BPE else 0.0
    pieces = []
    for name in names:
        kind, text = _UNUSED, name
        if name in (_BOS, _EOS, _PAD, _UNK):
            kind = _UNKNOWN if name == _UNK else _CONTROL
        elif LANGUAGE.fullmatch(name):
            kind, text = _USER_DEFINED, f"▁{name}"
        new = proto.SentencePiece(piece=text, score=unused, type=kind)
        pieces.append(old.get(name, new))
    for each in pieces[used or len(pieces) :]:
        if each.type == _NORMAL:  # bytes are needed as a whole
            each.type = _UNUSED
    spec = proto.trainer_spec
    spec.bos_piece, spec.eos_piece, spec.unk_piece, spec.pad_piece = _BOS, _EOS, _UNK, _PAD
    spec.vocab_size = len(pieces)
    del proto.pieces[:]
    proto.pieces.extend(pieces)
    return Tokenizer(proto.SerializeToString())
