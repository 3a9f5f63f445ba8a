"""Lines and digests of text files."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path

import pytest
from corpus_files import COMPRESS, write

from transformer_jax.text import files
from transformer_jax.text.files import read_lines, text_digest

MARK = b"\xef\xbb\xbf"  # a byte order mark


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    path = write(tmp_path / "x", "a\r\nb\u2028c\x0bd\x85e\r\r\n\nlast")
    assert list(read_lines(path)) == ["a", "b\u2028c\x0bd\x85e\r", "", "last"]


@pytest.mark.parametrize("mark", [b"", MARK])
def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: bytes) -> None:
    with Path(write(tmp_path / "x", mark + "ä\nb".encode())).open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert list(read_lines("-")) == ["ä", "b"]


@pytest.mark.parametrize("end", ["", *COMPRESS])
@pytest.mark.parametrize("text", [b"", b"\n", b"a\nb\n", b"a\n" + MARK + b"b"])
def test_a_byte_order_mark_is_not_text(tmp_path: Path, end: str, text: bytes) -> None:
    plain, marked = write(tmp_path / f"x{end}", text), write(tmp_path / f"y{end}", MARK + text)
    assert list(read_lines(marked)) == list(read_lines(plain))
    assert text_digest(marked) == text_digest(plain)


def test_unchanged_files_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "x"
    hashed: list[str] = []
    compute = files._compute_digest
    monkeypatch.setattr(files, "_compute_digest", lambda path: hashed.append(path) or compute(path))

    def hashes(settled: int = -1) -> int:
        monkeypatch.setattr(files, "_SETTLED", settled)
        hashed.clear()
        assert text_digest(str(path)) == hashlib.sha256(path.read_bytes()).hexdigest()
        return len(hashed)

    path.write_text("a\n")
    assert [hashes(10**12), hashes(10**12)] == [1, 1]  # it may change again at the same time
    assert [hashes(), hashes()] == [1, 0]
    about = path.stat()
    path.write_text("b\n")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))  # which leaves a trace
    assert [hashes(), hashes()] == [1, 0]
    (tmp_path / "y").write_text("c\n")
    (tmp_path / "y").rename(path)
    assert [hashes(), hashes()] == [1, 0]
    for memo in (tmp_path / "cache").rglob("digests/*"):
        memo.write_text(memo.read_text().replace('"text": "', '"text": "0')[:-3])
    assert [hashes(), hashes()] == [1, 0]
    for memo in (tmp_path / "cache").rglob("digests/*"):
        memo.write_text("{}")
    (tmp_path / "cache").rename(tmp_path / "other")
    (tmp_path / "cache").write_text("a file, in which nothing can be kept")
    assert [hashes(), hashes()] == [1, 1]


def test_a_byte_that_is_not_utf8_is_named_by_line_and_byte(tmp_path: Path) -> None:
    for number, raw in enumerate([b"ab\xffc", MARK + b"ab\xffc", MARK + b"\nab\xffc"]):
        path = write(tmp_path / str(number), raw)
        line = 2 if number == 2 else 1
        with pytest.raises(ValueError, match=rf"{re.escape(path)}: line {line}, byte 3: 0xff is"):
            list(read_lines(path))
