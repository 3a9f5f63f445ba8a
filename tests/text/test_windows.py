"""Windows of lines: full ones, those of slow input, and those before an error."""

import operator
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest

from transformer_jax.text.files import windows


@pytest.mark.parametrize("kind", [iter, list])
def test_windows_are_full_and_hold_every_line(kind: Callable[[Any], Any]) -> None:
    lines = [str(i) for i in range(1000)]
    parts = list(windows(kind(lines), 300))
    assert list(chain.from_iterable(parts)) == lines
    assert [len(window) for window in parts] == [300, 300, 300, 100]
    assert list(windows(kind(lines[:300]), 300)) == [lines[:300]]
    assert list(windows(kind([]), 300)) == []


def test_a_window_ends_when_no_line_arrives() -> None:
    more = threading.Event()

    def lines() -> Iterator[str]:
        yield "a"
        yield ""
        assert more.wait(100)
        yield "c"

    parts = windows(lines(), 300)
    assert next(parts) == ["a", ""]
    more.set()
    assert list(parts) == [["c"]]


def test_an_error_follows_the_lines_before_it() -> None:
    def lines() -> Iterator[str]:
        yield from "abc"
        raise OSError("gone")

    parts = windows(lines(), 2)
    assert [next(parts), next(parts)] == [["a", "b"], ["c"]]
    with pytest.raises(OSError, match="gone"):
        next(parts)


def test_nobody_reads_for_windows_that_are_not_asked_for() -> None:
    before, lines = {*threading.enumerate()}, iter(["x"] * 100)
    parts = windows(lines, 10)
    next(parts)
    (reader,) = {*threading.enumerate()} - before
    while operator.length_hint(lines) > 69:  # until the reader waits for room for the next line
        time.sleep(0.01)
    parts.close()
    reader.join(100)
    assert not reader.is_alive()
