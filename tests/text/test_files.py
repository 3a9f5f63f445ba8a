"""Lines and digests of text files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from corpus_files import COMPRESS, write

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


def test_a_byte_that_is_not_utf8_is_named_by_line_and_byte(tmp_path: Path) -> None:
    for number, raw in enumerate([b"ab\xffc", MARK + b"ab\xffc", MARK + b"\nab\xffc"]):
        path = write(tmp_path / str(number), raw)
        line = 2 if number == 2 else 1
        with pytest.raises(ValueError, match=rf"{re.escape(path)}: line {line}, byte 3: 0xff is"):
            list(read_lines(path))
