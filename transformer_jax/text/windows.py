"""Groups lines into windows as they arrive."""

import queue
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress

PATIENCE = 0.2
"""Seconds after which a window ends if no line arrives."""


def windows(lines: Iterable[str], size: int) -> Generator[list[str], None, None]:
    """Yields lists of up to `size` lines, fewer if none arrives for `PATIENCE` seconds or at the
    end.

    Lines that are not there already, as a list's are, are read in a thread, at most two windows
    ahead. An error in `lines` is raised after the window of the lines before it.
    """
    if isinstance(lines, Sequence):
        yield from (list(lines[i : i + size]) for i in range(0, len(lines), size))
        return
    arrived: queue.Queue[str | Exception | None] = queue.Queue(2 * size)
    abandoned = threading.Event()

    def read() -> None:
        end = None
        try:
            for line in lines:
                arrived.put(line)
                if abandoned.is_set():
                    return
        except Exception as error:
            end = error
        arrived.put(end)

    threading.Thread(target=read, name="read lines", daemon=True).start()
    try:
        item = arrived.get()
        while isinstance(item, str):
            window = [item]
            with suppress(queue.Empty):
                while len(window) < size and isinstance(item := arrived.get(timeout=PATIENCE), str):
                    window.append(item)
            yield window
            if isinstance(item, str):  # the last line of the window
                item = arrived.get()
        if item is not None:
            raise item
    finally:  # The thread may wait for room if nobody asks for the other windows.
        abandoned.set()
        with suppress(queue.Empty):
            arrived.get_nowait()
