"""Groups lines into windows as they arrive."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

PATIENCE = 0.2
"""Seconds after which a window ends if no line arrives."""


def windows(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yields lists of up to `size` lines, fewer if none arrives for `PATIENCE` seconds or at the
    end.

    Lines are read in a thread, at most two windows ahead. An error in `lines` is raised after the
    window of the lines before it.
    """
    arrived: queue.Queue[str | _End] = queue.Queue(2 * size)

    def read() -> None:
        error = None
        try:
            for line in lines:
                arrived.put(line)
        except Exception as raised:
            error = raised
        arrived.put(_End(error))

    threading.Thread(target=read, name="read lines", daemon=True).start()
    item = arrived.get()
    while isinstance(item, str):
        window = [item]
        item = None
        with suppress(queue.Empty):
            while len(window) < size and isinstance(item := arrived.get(timeout=PATIENCE), str):
                window.append(item)
        yield window
        item = item if isinstance(item, _End) else arrived.get()
    if item.error is not None:
        raise item.error


class _End(NamedTuple):
    """Follows the last line."""

    error: Exception | None
