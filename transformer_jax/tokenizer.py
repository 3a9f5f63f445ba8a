"""Text to ids and back: SentencePiece models behind this project's own ids.

The special ids live here. Models that this file trains have them at the same places; a model made
elsewhere keeps its own numbering inside, and a table translates.
"""

from __future__ import annotations

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

from transformer_jax.config import TokenizerConfig
from transformer_jax.subwords import Sampler

PAD, BOS, EOS, UNK = 0, 1, 2, 3
"""The special ids, whatever ids a user's own SentencePiece model gives them."""

TRAINING_LINES = 1_000_000
"""At most so many sampled lines train a model."""

_LINE_BREAKS_AND_CONTROLS = dict.fromkeys(
    [code for code in range(0x100) if unicodedata.category(chr(code)) == "Cc"] + [0x2028, 0x2029],
    " ",
)

sentencepiece.set_min_log_level(2)  # its errors are exceptions too


class Tokenizer:
    """One SentencePiece model and the table between its ids and ours.

    Ours: `PAD`, `BOS`, `EOS`, `UNK`, then the model's other pieces in their order. `size` is the
    number of ids, `digest` the SHA-256 of `model`. ValueError: `model` is no SentencePiece model.
    """

    def __init__(self, model: bytes) -> None:
        self.model = model
        self.digest = hashlib.sha256(model).hexdigest()
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ValueError("not a SentencePiece model, or a damaged one") from error
        theirs = self._processor
        special = [theirs.pad_id(), theirs.bos_id(), theirs.eos_id(), theirs.unk_id()]
        others = [i for i in range(theirs.get_piece_size()) if i not in special]
        self.size = len(special) + len(others)
        self._theirs = special + others
        self._ours = np.zeros(theirs.get_piece_size(), np.int32)
        for ours, theirs_id in enumerate(self._theirs):
            if theirs_id >= 0:
                self._ours[theirs_id] = ours

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without `BOS` and `EOS`. ValueError: a lone surrogate."""
        return self._ours[self._processor.encode(_valid(text), out_type=int)].tolist()

    def encode_all(self, texts: Iterable[str], threads: int = 1) -> list[list[int]]:
        """`encode` of each text, by several threads."""
        valid = [_valid(text) for text in texts]
        rows = self._processor.encode(valid, out_type=int, num_threads=threads)
        return [self._ours[ids].tolist() for ids in rows]

    def sample(self, ids: Sequence[int], sampling: float, *key: int) -> list[int]:
        """The text of `ids` cut into other subwords, a function of the arguments alone.

        BPE models drop each merge with probability `sampling`, above 0 and below 1 (BPE-dropout);
        unigram models draw from all ways to cut the text, with `sampling`, above 0, as the exponent
        of their probabilities. `key`: integers, such as seed, epoch and pair. Ids stay as they are
        where one is `UNK`, of which the text is not known. ValueError: the model is of another
        kind, or `sampling` too large for it.
        """
        if UNK in ids:
            return [*ids]
        try:
            theirs = self._sampler.sample([self._theirs[i] for i in ids], sampling, repr(key))
        except ValueError as error:
            raise ValueError(f"tokenizer.sampling={sampling}: {error}") from error
        return self._ours[theirs].tolist()

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.model)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` on one line; `PAD`, `BOS` and `EOS` are left out."""
        return _one_line(self._processor.decode([self._theirs[i] for i in ids if i > EOS]))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The piece of each id; `▁` marks the beginning of a word."""
        names = ("<pad>", "<s>", "</s>")
        return [names[i] if i <= EOS else self._processor.id_to_piece(self._theirs[i]) for i in ids]

    def normalize(self, text: str) -> str:
        """What `decode(encode(text))` is: the model's normalisation of `text`, on one line."""
        return _one_line(self._processor.normalize(_valid(text)).replace("▁", " "))


class Tokenizers(NamedTuple):
    """The two sides' tokenizers; one and the same object where the vocabulary is joint."""

    source: Tokenizer
    target: Tokenizer


def train(pairs: Iterable[tuple[str, str]], config: TokenizerConfig, seed: int = 0) -> Tokenizers:
    """Trains the tokenizers of `config` on `pairs`, or reads the models that `config` names.

    The same pairs, config and seed give the same models. ValueError: a model file that cannot be
    read, no text, or a vocabulary that the text does not support.
    """
    if config.models:
        return _from_files([Path(path) for path in config.models])
    sample = _sample(pairs, TRAINING_LINES // 2 if config.joint else TRAINING_LINES, seed)
    if config.joint:
        joint = _train(chain.from_iterable(sample), config)
        return Tokenizers(joint, joint)
    return Tokenizers(*(_train((pair[side] for pair in sample), config) for side in (0, 1)))


def save(tokenizers: Tokenizers, folder: Path) -> None:
    """Writes tokenizer.model, or source.model and target.model, into `folder`."""
    for name, tokenizer in zip(_names(tokenizers), dict.fromkeys(tokenizers), strict=True):
        (folder / name).write_bytes(tokenizer.model)


def load(folder: Path, digests: Sequence[str]) -> Tokenizers:
    """Reads what `save` wrote.

    `digests`: of the source's and the target's model. ValueError: a file is missing or damaged, or
    is another tokenizer.
    """
    joint = folder / "tokenizer.model"
    paths = [joint] if joint.exists() else [folder / "source.model", folder / "target.model"]
    tokenizers = _from_files(paths)
    for path, tokenizer, digest in zip((paths[0], paths[-1]), tokenizers, digests, strict=True):
        if tokenizer.digest != digest:
            raise ValueError(
                f"tokenizer {path}: is damaged or another one than the run was trained with: its"
                f" SHA-256 is {tokenizer.digest[:12]}… and must be {digest[:12]}…"
            )
    return tokenizers


def _names(tokenizers: Tokenizers) -> list[str]:
    joint = tokenizers.source is tokenizers.target
    return ["tokenizer.model"] if joint else ["source.model", "target.model"]


def _from_files(paths: list[Path]) -> Tokenizers:
    """One file: both sides share it."""
    made = [_from_file(path) for path in paths]
    return Tokenizers(made[0], made[-1])


def _from_file(path: Path) -> Tokenizer:
    try:
        return Tokenizer(path.read_bytes())
    except OSError as error:
        raise ValueError(f"tokenizer {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"tokenizer {path}: {error}") from error


def _sample(pairs: Iterable[tuple[str, str]], count: int, seed: int) -> list[tuple[str, str]]:
    """`count` pairs drawn evenly in one pass (reservoir sampling); all, where there are fewer."""
    draw = random.Random(seed).random  # the one sequence that Python promises never to change
    kept: list[tuple[str, str]] = []
    for i, pair in enumerate(pairs):
        if i < count:
            kept.append(pair)
        elif (place := int(draw() * (i + 1))) < count:
            kept[place] = pair
    return kept


@cache
def _rules() -> list[tuple[str, str]]:
    """What is rewritten in text before it is cut: SentencePiece's nmt_nfkc without its K.

    Accents are composed, spaces of all kinds are one kind, invisible characters go. But "…", "²" or
    "™" stay: a translation could never contain them otherwise.
    """
    rules = sentencepiece.SentencePieceNormalizer(rule_name="nmt_nfkc").decompile()
    compose = unicodedata.ucd_3_2_0.normalize  # the same in every version of Python
    return [(old, new) for old, new in rules if not new.strip() or compose("NFC", old) == new]


def _train(lines: Iterable[str], config: TokenizerConfig) -> Tokenizer:
    """Characters that make up the last 1e-4 of the text are too rare to learn an embedding of their
    own: they are spelt in bytes, unless pieces are whole words."""
    text = [_valid(line) for line in lines if line.strip()]
    if not text:
        raise ValueError("tokenizer: no text to train on; name a corpus that holds sentences")
    written = io.BytesIO()
    words = config.kind == "word"
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text),
            model_writer=written,
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
            num_threads=4,  # fixed: sums of floats, and so unigram models, depend on it
            max_sentence_length=1 << 20,
        )
    except RuntimeError as error:
        raise _explained(error, config) from error
    return Tokenizer(written.getvalue())


def _explained(error: RuntimeError, config: TokenizerConfig) -> ValueError:
    """SentencePiece's two messages about the vocabulary name the bound; the rest is passed on."""
    bounds = {
        "at most": re.search(r"set it to a value <= (\d+)", str(error)),
        "at least": re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)),
    }
    for which, match in bounds.items():
        if match:
            return ValueError(
                f"tokenizer.vocabulary={config.vocabulary}: must be {which} {match[1]}"
                f" for this text and tokenizer.kind={config.kind}"
            )
    return ValueError(f"tokenizer: SentencePiece failed: {error}")


def _valid(text: str) -> str:
    """`text`, or ValueError where it cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text {text!r}: lone surrogate U+{ord(text[error.start]):04X} at character"
            f" {error.start + 1}; must be Unicode text"
        ) from error
    return text


def _one_line(text: str) -> str:
    return text.translate(_LINE_BREAKS_AND_CONTROLS).strip()
