"""Parallel corpora: built in, two text files, TSV or JSONL."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from transformer_jax.config import DataConfig
from transformer_jax.errors import UserError
from transformer_jax.text import files

_FOLDER = Path(__file__).with_name("corpora")
_BUILT_IN = ("grammar", "recipes")

Pair = tuple[str, str]
"""A source sentence and its target sentence."""


@dataclass(frozen=True)
class Corpus:
    """A parallel corpus by name. Nothing is read before it is needed.

    name: `grammar` or `recipes` (built in; `grammar:test` names a split), `SOURCE,TARGET` (two
    text files), `FILE.tsv` or `FILE.jsonl`; each file may be compressed (`.gz`, `.xz`, `.bz2`).
    split: the split of a built-in corpus whose name has none.
    fields: the names of source and target in a JSONL line.
    """

    name: str
    split: str = "train"
    fields: tuple[str, str] = ("source", "target")

    def pairs(self) -> Iterator[Pair]:
        """Reads the pairs, one after the other.

        UserError: there is no such corpus or file, it holds no pair, or a line is malformed (its
        number is named).
        """
        kind, names = self._location
        readers = {"text": files.read_text, "jsonl": partial(files.read_jsonl, fields=self.fields)}
        pairs = readers.get(kind, files.read_tsv)(*names)
        if (first := next(pairs, None)) is None:
            raise UserError(f"{self.name}: empty; must hold at least one pair of sentences")
        yield first
        yield from pairs

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the text as it is now; compression makes no difference to it."""
        kind, names = self._location
        if kind == "built-in":
            return files.text_digest(names[0])
        digests = b"".join(bytes.fromhex(digest) for _, digest in self.file_digests)
        return hashlib.sha256(digests).hexdigest()

    @cached_property
    def file_digests(self) -> list[tuple[str, str]]:
        """The path of each file and the SHA-256 of its text; none of a built-in corpus."""
        kind, names = self._location
        paths = () if kind == "built-in" else names
        return [(path, files.text_digest(path)) for path in paths]

    @property
    def key(self) -> tuple[str, str, tuple[str, str]]:
        """What the pairs depend on."""
        return self._location[0], self.digest, self.fields

    @cached_property
    def _location(self) -> tuple[str, tuple[str, ...]]:
        kind, names = _locate(self.name, self.split)
        for path in names:
            files.make_rereadable(path)  # since the digest is read before the pairs
        return kind, names


class Corpora(NamedTuple):
    """The corpora of a run."""

    train: tuple[Corpus, ...]
    dev: tuple[Corpus, ...]

    @classmethod
    def of(cls, config: DataConfig) -> Corpora:
        """Returns the corpora that a config names. UserError: there is none to train on."""
        if not config.train:
            raise UserError("data.train=(): must name at least one corpus to train on")
        return cls(
            tuple(Corpus(name, "train", config.fields) for name in config.train),
            tuple(Corpus(name, "validation", config.fields) for name in config.dev),
        )

    def digests(self) -> dict[str, dict[str, str]]:
        """Returns the digest of each corpus by its name, for "train" and for "dev"."""
        parts = self._asdict().items()
        return {part: {each.name: each.digest for each in corpora} for part, corpora in parts}

    def file_digests(self) -> dict[str, str]:
        """Returns the digest of each file by its path, and of each built-in corpus by its name."""
        every = chain.from_iterable(self)
        digests = (each.file_digests or [(each.name, each.digest)] for each in every)
        return dict(chain.from_iterable(digests))


def _locate(name: str, split: str) -> tuple[str, tuple[str, ...]]:
    """Returns the kind of a corpus and its files."""
    built_in, _, part = name.partition(":")
    if built_in in _BUILT_IN:
        splits = {path.name.split(".")[1]: path for path in _FOLDER.glob(f"{built_in}.*")}
        if (split := part or split) not in splits:
            raise UserError(f"{name}: split {split!r}: must be one of {', '.join(sorted(splits))}")
        return "built-in", (str(splits[split]),)
    kind = _kind_of_file(name)
    if kind and ("," not in name or _exists(name)):
        return kind, (name,)
    if "," in name:
        sides = _split_at_comma(name)
        for path in sides:
            if kind := _kind_of_file(path):
                raise UserError(
                    f"corpus {name!r}: {path} holds both sides, and is a corpus alone; put a "
                    "space between corpora, and a comma between two text files"
                )
        return "text", sides
    raise UserError(
        f"corpus {name!r}: must be grammar, recipes, either with :SPLIT, SOURCE,TARGET (two text"
        " files), FILE.tsv or FILE.jsonl; files may end in .gz, .xz or .bz2"
    )


def _kind_of_file(path: str) -> str | None:
    """Returns the kind of a corpus in one file, by the end of its name; None: it has none."""
    name = files.uncompressed_name(path)
    return next((kind for kind in ("tsv", "jsonl") if name.endswith(f".{kind}")), None)


def _split_at_comma(name: str) -> tuple[str, str]:
    """Returns the two files that `SOURCE,TARGET` names; file names may hold commas themselves."""
    commas = [index for index, character in enumerate(name) if character == ","]
    splits = [(name[:index], name[index + 1 :]) for index in commas]
    existing = [split for split in splits if all(map(_exists, split))]
    if len(existing) == 1:
        return existing[0]
    if len(splits) == 1 and not _kind_of_file(name):
        return splits[0]  # reading it names the file that is missing
    raise UserError(
        f"corpus {name!r}: no such file, and {len(existing)} of its {len(splits)} commas stand "
        "between two existing files; must be one file, or SOURCE,TARGET with exactly one such comma"
    )


def _exists(path: str) -> bool:
    return os.access(path, os.F_OK)  # not if the name is too long, for which Path.exists raises
