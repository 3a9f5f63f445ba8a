"""Requests that training stop at the next step when the process receives SIGINT or SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StopRequest:
    """A request to stop, which is true once a signal has arrived; `signal` is its name."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Sets the request at the first SIGINT or SIGTERM; a second signal has its default effect.

    Outside the main thread, which alone handles signals, the request is never set.
    """
    request = StopRequest()

    def note(number: int, _: Any) -> None:
        request.signal = signal.Signals(number).name
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
