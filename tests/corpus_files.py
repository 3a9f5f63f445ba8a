"""Corpora in files, well formed and malformed, that several tests share."""

import bz2
import gzip
import io
import lzma
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceTrainer

from transformer_jax.config import TokenizerConfig
from transformer_jax.text import tokenizer
from transformer_jax.text.tokenizer import Tokenizers

PAIRS = [
    ("A dog runs.", "Ein Hund läuft."),
    ("", "nichts"),
    ("x\u2028y", "\x0bz\x85"),
    ("b\r", "ü"),
]


COMPRESS = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


def write(path: Path, data: str | bytes) -> str:
    """Writes a file, compressed if its name says so; returns its name."""
    raw = data.encode() if isinstance(data, str) else data
    path.write_bytes(COMPRESS.get(path.suffix, bytes)(raw))
    return str(path)


def text_pair(folder: Path, pairs: Sequence[tuple[str, str]], end: str = "") -> str:
    """A corpus of two text files."""
    sides = zip(*pairs, strict=True)
    names = [
        write(folder / f"{name}{end}", "".join(f"{line}\n" for line in side))
        for name, side in zip(("source", "target"), sides, strict=True)
    ]
    return ",".join(names)


def sentencepiece_model(lines: Iterable[str], **options: Any) -> bytes:
    """A model as SentencePiece trains it."""
    model, options = io.BytesIO(), {"minloglevel": 2, **options}
    SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **options)
    return model.getvalue()


@cache
def small_tokenizers() -> Tokenizers:
    """One of 300 pieces for both sides, of sentences such as "the 3 dogs of number 10"."""
    lines = [f"the {i % 7} dogs of number {i}" for i in range(300)]
    return tokenizer.train([(line, line[::-1]) for line in lines], TokenizerConfig(vocabulary=300))


XZ, BZIP2 = lzma.compress(b"a\tb\n" * 99), bz2.compress(b"a\tb\n" * 99)
GZIP = gzip.compress(b"a\tb\n" * 99)
MALFORMED = {
    "neither.txt": (b"", r"corpus '\S*neither.txt': must be grammar, .*FILE\.tsv or FILE\.jsonl"),
    "missing.tsv": (None, r"missing\.tsv: No such file or directory; must be a readable file"),
    "none.tsv": (b"", r"none\.tsv: empty; must hold at least one pair"),
    "tabs.tsv": (b"a\tb\nc\n", r"tabs\.tsv: line 2: 0 tabs; must be SOURCE, tab, TARGET"),
    "more.tsv": (b"a\tb\tc\n", r"more\.tsv: line 1: 2 tabs; must be SOURCE, tab, TARGET"),
    "byte.tsv": (b"a\tb\nabc\xffd\te", r"byte\.tsv: line 2, byte 4: 0xff is not UTF-8; must be"),
    "cut.tsv.gz": (GZIP[:-9], r"cut\.tsv\.gz: damaged \.gz file"),
    "flip.tsv.gz": (GZIP[:15] + b"\0" + GZIP[16:], r"flip\.tsv\.gz: damaged \.gz file"),
    "not.tsv.gz": (b"a\tb", r"not\.tsv\.gz: damaged \.gz file"),
    "cut.tsv.xz": (XZ[:-9], r"cut\.tsv\.xz: damaged \.xz file"),
    "flip.tsv.xz": (XZ[:40] + b"\0" + XZ[41:], r"flip\.tsv\.xz: damaged \.xz file"),
    "not.tsv.xz": (b"a\tb", r"not\.tsv\.xz: damaged \.xz file"),
    "cut.tsv.bz2": (BZIP2[:-9], r"cut\.tsv\.bz2: damaged \.bz2 file"),
    "flip.tsv.bz2": (BZIP2[:20] + b"\0" + BZIP2[21:], r"flip\.tsv\.bz2: damaged \.bz2 file"),
    "not.tsv.bz2": (b"a\tb", r"not\.tsv\.bz2: damaged \.bz2 file"),
    "gzip.tsv": (GZIP, r"gzip\.tsv: is a gzip file, whose name must end in \.gz; must be UTF-8"),
    "xz.tsv": (XZ, r"xz\.tsv: is an xz file, whose name must end in \.xz; must be"),
    "bz2.jsonl": (BZIP2, r"bz2\.jsonl: is a bzip2 file, whose name must end in \.bz2; must be"),
    "tar.tsv.gz": (gzip.compress(b"a".ljust(257, b"\0") + b"ustar"), r"\.gz: is a tar archive"),
    "zip.tsv": (b"PK\x03\x04\x14\0", r"zip\.tsv: is a zip archive; must be UTF-8 text, plain or"),
    "zstd.tsv": (b"\x28\xb5\x2f\xfd\x04", r"zstd\.tsv: is a Zstandard file"),
    "pdf.tsv": (b"%PDF-1.7\n", r"pdf\.tsv: is a PDF document"),
    "sqlite.tsv": (b"SQLite format 3\0", r"sqlite\.tsv: is a SQLite database"),
    "utf32.tsv": ("a\tb\n".encode("utf-32-le"), r"utf32\.tsv: is UTF-16 or UTF-32 text"),
    "pickle.tsv": (b"\x80\x04\x95", r"pickle\.tsv: is a pickle"),
    "parquet.jsonl": (b"PAR1\x15\x04", r"parquet\.jsonl: is a Parquet file"),
    "bom.tsv": ("a\tb\n".encode("utf-16"), r"bom\.tsv: is UTF-16 or UTF-32 text"),
    "le.tsv": ("a\tb\n".encode("utf-16-le"), r"le\.tsv: is UTF-16 or UTF-32 text"),
    "be.tsv": ("a\tb\n".encode("utf-16-be"), r"be\.tsv: is UTF-16 or UTF-32 text"),
    "wide.tsv": ("a\tb\n".encode("utf-32"), r"wide\.tsv: is UTF-16 or UTF-32 text"),
    "bad.jsonl": (b'{"source": "a", "target": "b"}\n{', r"bad\.jsonl: line 2: not JSON \("),
    "key.jsonl": (b'{"source": "a"}', r"key\.jsonl: line 1: must be an object with .*'target'"),
    "list.jsonl": (b'["source", "target"]', r"list\.jsonl: line 1: must be an object"),
    "type.jsonl": (b'{"source": 1, "target": "b"}', r"type\.jsonl: line 1: must be an object"),
    "lone.jsonl": (b'{"source": "\\ud800", "target": ""}', r"line 1: must be .*Unicode texts"),
    "deep.jsonl": (b"[" * 100_000, r"deep\.jsonl: line 1: not JSON .*too deeply"),
    "digits.jsonl": (b"9" * 5000, r"digits\.jsonl: line 1: not JSON .*too many digits"),
}
"""By file name: the content (None: no such file) and what the error says."""
