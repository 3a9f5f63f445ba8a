"""Requests that training stop at the next step when the process receives SIGINT or SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


class StopRequest:
    """A request to stop; `signal` is the number of the signal that has arrived, or 0."""

    def __init__(self) -> None:
        self.signal = 0


def end_by(number: int) -> NoReturn:
    """Ends the program as one that a signal has stopped: KeyboardInterrupt for SIGINT, otherwise
    SystemExit with the status of a shell, 128 + `number`."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Sets the request at the first SIGINT or SIGTERM; a second signal has its default effect.

    Outside the main thread, which alone handles signals, the request is never set.
    """
    request = StopRequest()

    def note(number: int, _: Any) -> None:
        request.signal = number
        for name, handler in old.items():
            signal.signal(name, handler)

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    old = {name: signal.signal(name, note) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for name, handler in old.items():
            signal.signal(name, handler)
