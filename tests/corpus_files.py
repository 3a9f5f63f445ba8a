"""Corpora in files, well formed and malformed, that several tests share."""

import gzip
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from transformer_jax.config import TokenizerConfig
from transformer_jax.text import tokenizer
from transformer_jax.text.tokenizer import Tokenizers

PAIRS = [
    ("A dog runs.", "Ein Hund läuft."),
    ("", "nichts"),
    ("x\u2028y", "\x0bz\x85"),
    ("b\r", "ü"),
]


def write(path: Path, data: str | bytes) -> str:
    """Writes a file, compressed if its name says so; returns its name."""
    raw = data.encode() if isinstance(data, str) else data
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return str(path)


def text_pair(folder: Path, pairs: Sequence[tuple[str, str]], end: str = "") -> str:
    """A corpus of two text files."""
    sides = zip(*pairs, strict=True)
    names = [
        write(folder / f"{name}{end}", "".join(f"{line}\n" for line in side))
        for name, side in zip(("source", "target"), sides, strict=True)
    ]
    return ",".join(names)


@cache
def small_tokenizers() -> Tokenizers:
    """One of 300 pieces for both sides, of sentences such as "the 3 dogs of number 10"."""
    lines = [f"the {i % 7} dogs of number {i}" for i in range(300)]
    return tokenizer.train([(line, line[::-1]) for line in lines], TokenizerConfig(vocabulary=300))


GZIP = gzip.compress(b"a\tb\n" * 99)
MALFORMED = {
    "neither.txt": (b"", r"corpus '\S*neither.txt': must be grammar, .*FILE\.tsv or FILE\.jsonl"),
    "missing.tsv": (None, r"missing\.tsv: No such file or directory; must be a readable file"),
    "none.tsv": (b"", r"none\.tsv: empty; must hold at least one pair"),
    "tabs.tsv": (b"a\tb\nc\n", r"tabs\.tsv: line 2: 0 tabs; must be SOURCE, tab, TARGET"),
    "more.tsv": (b"a\tb\tc\n", r"more\.tsv: line 1: 2 tabs; must be SOURCE, tab, TARGET"),
    "byte.tsv": (b"a\tb\nabc\xffd\te", r"byte\.tsv: line 2, byte 4: 0xff is not UTF-8; must be"),
    "cut.tsv.gz": (GZIP[:-9], r"cut\.tsv\.gz: damaged gzip file"),
    "flip.tsv.gz": (GZIP[:15] + b"\0" + GZIP[16:], r"flip\.tsv\.gz: damaged gzip file"),
    "not.tsv.gz": (b"a\tb", r"not\.tsv\.gz: damaged gzip file"),
    "bad.jsonl": (b'{"source": "a", "target": "b"}\n{', r"bad\.jsonl: line 2: not JSON \("),
    "key.jsonl": (b'{"source": "a"}', r"key\.jsonl: line 1: must be an object with .*'target'"),
    "list.jsonl": (b'["source", "target"]', r"list\.jsonl: line 1: must be an object"),
    "type.jsonl": (b'{"source": 1, "target": "b"}', r"type\.jsonl: line 1: must be an object"),
    "lone.jsonl": (b'{"source": "\\ud800", "target": ""}', r"line 1: must be .*Unicode texts"),
    "deep.jsonl": (b"[" * 100_000, r"deep\.jsonl: line 1: not JSON .*too deeply"),
    "digits.jsonl": (
        b'{"source": "a", "target": "b"}\n{"id": ' + b"9" * 5000 + b"}",
        r"digits\.jsonl: line 2: not JSON .*too many digits",
    ),
}
"""By file name: the content (None: no such file) and what the error says."""
