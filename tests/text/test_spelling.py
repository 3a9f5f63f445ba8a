"""Pieces of one vocabulary, spelled with those of another."""

from typing import Literal

import pytest

from transformer_jax.config import TokenizerConfig
from transformer_jax.special_ids import BOS, EOS, PAD, UNK
from transformer_jax.text import tokenizer
from transformer_jax.text.spelling import spell
from transformer_jax.text.tokenizer import Tokenizer, is_byte

OLD = "the newest houses of the lowest streets were widest then"
NEW = "the lower house has wider streets than the newer ones ¿été?"


def trained(text: str, kind: Literal["bpe", "unigram", "word"], vocabulary: int) -> Tokenizer:
    config = TokenizerConfig(kind=kind, vocabulary=vocabulary)
    return tokenizer.train([(text, text)] * 5, config).source


@pytest.mark.parametrize(("kind", "size"), [("bpe", 300), ("unigram", 280)])
def test_a_new_piece_is_spelled_by_old_ones(kind: Literal["bpe", "unigram"], size: int) -> None:
    """Their texts add up to its own, with a mark of a word's beginning only if it has one; bytes
    spell a character that the old vocabulary has no piece for."""
    new, old = trained(NEW, "bpe", 310), trained(OLD, kind, size)
    spelling = spell(new, old)
    assert spelling.ids[:4] == [[PAD], [BOS], [EOS], [UNK]]
    pieces, known = new.pieces(range(new.size)), {*old.pieces(range(4, old.size))}
    both = [piece for piece in pieces[4:] if piece in known]
    assert (spelling.taken, spelling.dropped) == (4 + len(both), old.size - 4 - len(both))
    assert len(both) > 256
    made = 0
    for piece, ids in zip(pieces[4:], spelling.ids[4:], strict=True):
        spelled = old.pieces(ids)
        if piece in known:
            assert spelled == [piece]
        elif any(map(is_byte, spelled)):
            assert {*piece} - {*OLD}
        else:
            made += 1
            assert "".join(spelled) == piece
    assert made > 5


def test_what_cannot_be_spelled_is_unknown() -> None:
    """A vocabulary of words has neither bytes nor parts of words; the name of a byte is no text."""
    new, words = trained(NEW, "bpe", 300), trained(f"{OLD} <0x41>", "word", 300)
    spelling = spell(new, words)
    by_piece = dict(zip(new.pieces(range(new.size)), spelling.ids, strict=True))
    assert by_piece["▁the"] == [words.find("▁the")]
    assert by_piece["<0x41>"] == [UNK]
    assert by_piece["▁h"] == [UNK]
    assert words.encode("<0x41>") != [UNK]
