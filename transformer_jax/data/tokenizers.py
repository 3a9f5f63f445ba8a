"""Tokenizers trained on corpora, and their cache on disk."""

import base64
import dataclasses
import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import sentencepiece

from transformer_jax.config import Config
from transformer_jax.data.entry import cache_of, check_cache, share, writing_to_cache
from transformer_jax.files import json_digest, parse_json, write_whole
from transformer_jax.text import tokenizer
from transformer_jax.text.corpus import Corpus
from transformer_jax.text.tokenizer import Tokenizer, Tokenizers

_FORMAT = 2  # of a cache entry, and of what training does with text


def tokenizers_of(corpora: Sequence[Corpus], config: Config, process_index: int = 0) -> Tokenizers:
    """Returns the tokenizers of `config`, trained on `corpora` or read from the cache.

    Process 0 writes the cache. UserError: as `tokenizer.train`, or the cache cannot be written to.
    """
    pairs = chain.from_iterable(corpus.pairs() for corpus in corpora)
    if config.tokenizer.models:
        return tokenizer.train(pairs, config.tokenizer)
    entry = cache_of(config.data) / f"{_entry_name(corpora, config)}.json"
    if (stored := _read(entry)) is not None:
        return stored
    if process_index == 0:
        check_cache(entry.parent)
    trained = tokenizer.train(pairs, config.tokenizer, config.train.seed)
    if process_index == 0:
        _write(entry, trained)
    return trained


def _entry_name(corpora: Sequence[Corpus], config: Config) -> str:
    """Returns a digest of everything that the models depend on."""
    options = dataclasses.asdict(config.tokenizer)
    del options["sampling"]
    keys = [corpus.key for corpus in corpora]
    return json_digest([_FORMAT, sentencepiece.__version__, options, config.train.seed, keys])


def _write(entry: Path, tokenizers: Tokenizers) -> None:
    models = [
        {"digest": each.digest, "model": base64.b64encode(each.model).decode()}
        for each in dict.fromkeys(tokenizers)  # one if the vocabulary is joint
    ]
    with writing_to_cache(entry.parent):
        write_whole(entry, json.dumps(models))
    with suppress(OSError):  # it belongs to another user, who has just written the same
        share(entry, entry.parent)


def _read(entry: Path) -> Tokenizers | None:
    """Returns the tokenizers of a cache entry, or None if it is missing or damaged."""
    try:
        models = parse_json(entry.read_bytes())
        sides = [Tokenizer(base64.b64decode(each["model"])) for each in models]
        intact = [side.digest for side in sides] == [each["digest"] for each in models]
        return Tokenizers(sides[0], sides[-1]) if intact else None
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
