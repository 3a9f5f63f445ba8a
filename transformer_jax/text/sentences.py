"""Splits lines that are too long for a model at the ends of sentences, clauses and words."""

import re
from collections.abc import Callable
from itertools import pairwise

_CLOSING = "[\"'»”’)\\]」』”’）】]*"

_SENTENCES = re.compile(rf"[.!?…؟۔։]{_CLOSING}(?=\s)|[。！？｡।॥።។]+{_CLOSING}")
"""The end of a sentence. Marks of scripts with spaces end one only before a space."""

_WITHIN = [
    re.compile(r"[,;:،؛–—](?=\s)|[，、；：]"),
    re.compile(r"(?=\s)"),
    re.compile(r"(?=\w)"),  # not before a combining character
    re.compile(r"(?s:.)"),
]
"""Where sentences may be split: at the ends of clauses, else of words, else anywhere."""


def split(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Returns the parts of a text, whose concatenation it is: the text if it fits, else its
    sentences. Those that do not fit are halved until all parts do, or are single characters."""
    if fits(text):
        return [text]
    ends = [0, *(match.end() for match in _SENTENCES.finditer(text)), len(text)]
    sentences = [text[begin:end] for begin, end in pairwise(ends)]
    return [half for each in sentences if each for half in _halves(each, fits)]


def _halves(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Returns the parts of a sentence, split near the middle at the best kind of place."""
    for place in [] if fits(text) else _WITHIN:
        ends = [match.end() for match in place.finditer(text) if 0 < match.end() < len(text)]
        if ends:
            middle = min(ends, key=lambda end: abs(2 * end - len(text)))
            return _halves(text[:middle], fits) + _halves(text[middle:], fits)
    return [text]
