"""What the built-in corpora share: their pairs, data, splits and random choices."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from transformer_jax.errors import UserError

T = TypeVar("T")


class Pair(NamedTuple):
    """A sentence and its translation, or its labels."""

    source: str
    target: str


class Draw(random.Random):
    """Random choices that are the same on every machine and with every version of Python.

    Python promises this for `random()` only, so that everything is drawn with it.
    """

    def pick(self, items: Sequence[T]) -> T:
        """Returns one of the items."""
        return items[int(self.random() * len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """Returns the items in random order."""
        return sorted(items, key=lambda _: self.random())


def read_data(name: str) -> dict[str, Any]:
    """Returns the contents of a JSON file in this folder."""
    return json.loads(Path(__file__).with_name(name).read_text("utf-8"))


def split_of(splits: Mapping[str, list[T]], name: str) -> list[T]:
    """Returns a copy of the split of this name. UserError: there is none."""
    if name not in splits:
        raise UserError(f"split {name!r}: must be one of {', '.join(splits)}")
    return list(splits[name])


def as_text(words: Sequence[str]) -> str:
    """Returns the words with a capital letter, and without spaces before punctuation marks."""
    text = " ".join(word for word in words if word)
    for mark in ",.?":
        text = text.replace(f" {mark}", mark)
    return text[0].upper() + text[1:]
