"""Tokenizers: SentencePiece models with this project's numbering of ids.

Models trained here number the special ids as `special_ids` does. A model made elsewhere may number
them differently; a table translates between its ids and ours.
"""

import hashlib
import io
import random
import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import sentencepiece
from jaxtyping import Int32

from transformer_jax.config import TokenizerConfig
from transformer_jax.errors import UserError, about
from transformer_jax.files import AnyPath, flush_to_disk
from transformer_jax.special_ids import BOS, EOS, PAD, UNK
from transformer_jax.text.subwords import Sampler

TRAINING_LINES = 1_000_000
"""The number of lines that a model is trained on; a longer text is sampled."""

_NAMES = {PAD: "<pad>", BOS: "<s>", EOS: "</s>"}
"""The special ids without text, as `pieces` shows them."""

_LINE_BREAKS_AND_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029], " ")

_INVISIBLE = re.compile(
    r"[\x01-\x1f\x7f-\x9f\ufff9-\ufffb"  # controls, marks of annotations
    r"\xad\u034f\u200b\u2060-\u206f\ufeff"  # of hyphens, widths, words and operators
    r"\u061c\u200e\u200f\u202a-\u202e"  # of direction
    r"\ufe00-\ufe0f\U000e0000-\U000e0fff"  # variation selectors, tags
    r"\u17b4\u17b5\U0001bca0-\U0001bca3\U0001d173-\U0001d17a]"  # of Khmer, shorthand, music
)
"""The characters that are removed: controls, and those that Unicode calls default ignorable, but
for joiners and what is a part of Hangul and Mongolian letters."""

_SPACES = "\t\n\v\f\r\x85\u2800\u3164\uffa0"
"""Characters that become a space, besides those of SentencePiece: line breaks and blanks."""

_JOINERS = "\u200c\u200d"
"""The zero-width non-joiner and joiner. They are letters of a word in Persian and in the languages
of India, and join emoji; before a letter of `_ALPHABETS` they are removed."""

_ALPHABETS = ("LATIN", "GREEK", "CYRILLIC")

sentencepiece.set_min_log_level(2)  # its errors are exceptions too


class Tokenizer:
    """A SentencePiece model, and the table between its ids and ours.

    Our ids are `PAD`, `BOS`, `EOS`, `UNK`, then the model's other pieces in their order. `size` is
    the number of ids and `digest` the SHA-256 of `model`. `model_ids` are the model's own ids in
    the order of ours; -1: the model has none. `our_ids` are ours in the order of the model's own.

    UserError: `model` is not a SentencePiece model.
    """

    def __init__(self, model: bytes) -> None:
        self.model = model
        self.digest = hashlib.sha256(model).hexdigest()
        processor = self._processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise UserError("not a SentencePiece model, or a damaged one") from error
        model_size = processor.get_piece_size()
        special = [processor.pad_id(), processor.bos_id(), processor.eos_id(), processor.unk_id()]
        self.model_ids = special + [i for i in range(model_size) if i not in special]
        self.size = len(self.model_ids)
        self.our_ids = np.full(model_size, PAD, np.int32)
        for id, model_id in enumerate(self.model_ids):
            if model_id >= 0:
                self.our_ids[model_id] = id

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without `BOS` and `EOS`.

        UserError: the text has a lone surrogate.
        """
        return self.our_ids[self._processor.encode(_valid(text), out_type=int)].tolist()

    def encode_all(
        self, texts: Iterable[str], threads: int = 1
    ) -> tuple[Int32[np.ndarray, " N"], Int32[np.ndarray, " P"]]:
        """Returns `encode` of all texts, one after the other, and the length of each.

        `threads` threads compute it.
        """
        valid = [_valid(text) for text in texts]
        rows = self._processor.encode(valid, out_type=int, num_threads=threads)
        ids = np.fromiter(chain.from_iterable(rows), np.int32)
        return self.our_ids[ids], np.fromiter(map(len, rows), np.int32)

    def sample(self, ids: Sequence[int], sampling: float, *key: int) -> list[int]:
        """Samples another segmentation of the text of `ids`, a function of the arguments alone.

        BPE models drop each merge with probability `sampling`, above 0 and below 1 (BPE-dropout).
        Unigram models sample from all segmentations of the text, with their probabilities raised to
        the power of `sampling`, above 0. `key` consists of integers, such as seed, epoch and pair.
        Returns `ids` unchanged if one of them is `UNK`, whose text is not known.

        UserError: the model is neither BPE nor unigram, or `sampling` is too large for it.
        """
        if UNK in ids:
            return [*ids]
        with about(f"tokenizer.sampling={sampling}", ValueError):
            sampled = self._sampler.sample([self.model_ids[i] for i in ids], sampling, repr(key))
        return self.our_ids[sampled].tolist()

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.model)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids` on one line, without `PAD`, `BOS` and `EOS`."""
        model_ids = [self.model_ids[i] for i in ids if i not in _NAMES]
        return _one_line(self._processor.decode(model_ids))

    def normalize(self, text: str) -> str:
        """Returns `text` as the model sees it, which is what decoding its ids gives."""
        return _one_line(self._processor.normalize(_valid(text)).replace("▁", " "))

    def find(self, piece: str) -> int:
        """Returns the id of a piece. UserError: the vocabulary has no such piece."""
        names = {name: i for i, name in _NAMES.items()}
        if piece in names:
            return names[piece]
        model_id = self._processor.piece_to_id(piece)
        if self._processor.id_to_piece(model_id) != piece:
            raise UserError(f"piece {piece!r}: is not in the tokenizer's vocabulary")
        return int(self.our_ids[model_id])

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns the piece of each id; `▁` marks the beginning of a word."""
        piece = self._processor.id_to_piece
        return [_NAMES[i] if i in _NAMES else piece(self.model_ids[i]) for i in ids]

    def uncovered(self, ids: Int32[np.ndarray, " N"]) -> float:
        """Returns the share of ids that stand for characters without a piece of their own: `UNK`
        and bytes."""
        bytes_ = [i for i, piece in enumerate(self.pieces(range(self.size))) if is_byte(piece)]
        return float(np.sum(np.isin(ids, [UNK, *bytes_]))) / max(len(ids), 1)


def is_byte(piece: str) -> bool:
    """Returns whether a piece stands for a byte of a character without a piece of its own."""
    return re.fullmatch("<0x[0-9A-F]{2}>", piece) is not None


_SIDES = ("source.model", "target.model")
"""Files of the tokenizers of a run, if they are not the same."""


class Tokenizers(NamedTuple):
    """The tokenizers of source and target: the same object if the vocabulary is joint."""

    source: Tokenizer
    target: Tokenizer

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of source and target ids."""
        return self.source.size, self.target.size


def train(pairs: Iterable[tuple[str, str]], config: TokenizerConfig, seed: int = 0) -> Tokenizers:
    """Trains the tokenizers of `config` on `pairs`, or reads the models that `config` names.

    The same pairs, config and seed give the same models.

    UserError: a model file cannot be read, there is no text, or the text does not allow a
    vocabulary of this size.
    """
    if config.models:
        return _from_files([Path(path) for path in config.models])
    sample = _sample(pairs, TRAINING_LINES // 2 if config.joint else TRAINING_LINES, seed)
    if config.joint:
        joint = _train(chain.from_iterable(sample), config)
        return Tokenizers(joint, joint)
    return Tokenizers(*(_train((pair[side] for pair in sample), config) for side in (0, 1)))


def digests(config: TokenizerConfig) -> dict[str, str]:
    """Returns the SHA-256 of each model that the config names. UserError: one cannot be read."""
    return {path: _from_file(Path(path)).digest for path in config.models}


def save(tokenizers: Tokenizers, folder: AnyPath) -> None:
    """Writes tokenizer.model, or source.model and target.model, to `folder`."""
    names = ["tokenizer.model"] if tokenizers.source is tokenizers.target else _SIDES
    for name, tokenizer in zip(names, dict.fromkeys(tokenizers), strict=True):
        (folder / name).write_bytes(tokenizer.model)
        flush_to_disk(folder / name)


def remove(folder: AnyPath) -> None:
    """Deletes what `save` may have written."""
    for name in ("tokenizer.model", *_SIDES):
        (folder / name).unlink(missing_ok=True)


def load(folder: AnyPath, digests: Sequence[str]) -> Tokenizers:
    """Reads the tokenizers that `save` wrote.

    `digests` are those of the source's and the target's model.

    UserError: a file is missing or damaged, or belongs to another tokenizer.
    """
    sides = [folder / name for name in _SIDES]
    paths = sides if any(path.exists() for path in sides) else [folder / "tokenizer.model"]
    tokenizers = _from_files(paths)
    for path, tokenizer, digest in zip((paths[0], paths[-1]), tokenizers, digests, strict=True):
        if tokenizer.digest != digest:
            raise UserError(
                f"tokenizer {path}: is damaged or is not the one that the run was trained with: its"
                f" SHA-256 is {tokenizer.digest[:12]}… and must be {digest[:12]}…"
            )
    return tokenizers


def _from_files(paths: Sequence[AnyPath]) -> Tokenizers:
    """Reads the tokenizers of both sides, which share it if there is only one file."""
    tokenizers = [_from_file(path) for path in paths]
    return Tokenizers(tokenizers[0], tokenizers[-1])


def _from_file(path: AnyPath) -> Tokenizer:
    with about(f"tokenizer {path}", ValueError):
        if isinstance(path, Path) and path.is_fifo():
            raise UserError("is a pipe, and would be read twice; name a file")
        return Tokenizer(path.read_bytes())


def _sample(pairs: Iterable[tuple[str, str]], count: int, seed: int) -> list[tuple[str, str]]:
    """Returns `count` pairs sampled uniformly in one pass (reservoir sampling), or all if fewer."""
    draw = random.Random(seed).random  # Python promises never to change this sequence
    reservoir: list[tuple[str, str]] = []
    for i, pair in enumerate(pairs):
        if i < count:
            reservoir.append(pair)
        elif (index := int(draw() * (i + 1))) < count:
            reservoir[index] = pair
    return reservoir


@cache
def _rules() -> list[tuple[str, str]]:
    """Returns the normalization rules: SentencePiece's nmt_nfkc without compatibility mappings.

    Accents are composed, all kinds of spaces become one, and invisible characters are removed.
    Characters such as "…", "²" and "™" are kept, since a translation could not contain them
    otherwise.
    """
    theirs = sentencepiece.SentencePieceNormalizer(rule_name="nmt_nfkc").decompile()
    unicode = unicodedata.ucd_3_2_0  # the same in every version of Python
    rules = {
        old: new
        for old, new in theirs
        if old not in _JOINERS and (new == " " or unicode.normalize("NFC", old) == new)
    }
    rules |= dict.fromkeys(_INVISIBLE.findall("".join(map(chr, range(0xF0000)))), "")
    rules |= dict.fromkeys(_SPACES, " ")
    letters = {letter: letter for letter in map(chr, range(0x2000))}
    rules |= {
        joiner + old: new
        for joiner in _JOINERS
        for old, new in (letters | rules).items()
        if unicode.name(new[:1] or " ", "").startswith(_ALPHABETS)
    }
    return [*rules.items()]


def _train(lines: Iterable[str], config: TokenizerConfig) -> Tokenizer:
    """Trains a tokenizer.

    The rarest characters, which make up 1e-4 of the text, get no embedding of their own: they are
    written as bytes, except in models of whole words.
    """
    text = [_valid(line) for line in lines if line.strip()]
    if not text:
        raise UserError("tokenizer: no text to train on; name a corpus that holds sentences")
    model = io.BytesIO()
    words = config.kind == "word"
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text),
            model_writer=model,
            model_type=config.kind,
            vocab_size=config.vocabulary,
            hard_vocab_limit=not words,
            user_defined_symbols=[_valid(symbol).replace(" ", "▁") for symbol in config.symbols],
            normalizer=sentencepiece.SentencePieceNormalizer(
                norm_map=_rules(),
                add_dummy_prefix=True,
                remove_extra_whitespaces=True,
                escape_whitespaces=True,
            ),
            character_coverage=0.9999,
            byte_fallback=not words,
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            num_threads=4,  # fixed, since unigram models depend on the order of float sums
            max_sentence_length=1 << 20,
        )
    except RuntimeError as error:
        raise _user_error(error, config) from error
    return Tokenizer(model.getvalue())


def _user_error(error: RuntimeError, config: TokenizerConfig) -> UserError:
    """Returns SentencePiece's error in terms of our config, if it is about the vocabulary's size.

    Other messages are passed on.
    """
    bounds = {
        "at most": re.search(r"set it to a value <= (\d+)", str(error)),
        "at least": re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)),
    }
    for which, match in bounds.items():
        if match:
            wanted = f"{which} {match[1]} for this text and tokenizer.kind={config.kind}"
            return UserError(f"tokenizer.vocabulary={config.vocabulary}: must be {wanted}")
    return UserError(f"tokenizer: SentencePiece failed: {error}")


def _valid(text: str) -> str:
    """Returns `text` without NUL, for which no model can have a rule.

    UserError: it cannot be written as UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} at character {error.start + 1}"
        raise UserError(f"text {text!r}: lone surrogate {found}; must be Unicode text") from error
    return text.replace("\0", "")


def _one_line(text: str) -> str:
    return text.translate(_LINE_BREAKS_AND_CONTROLS).strip()
