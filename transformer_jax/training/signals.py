"""Requests that training stop when the process receives SIGINT or SIGTERM.

Training stops between two steps, or between two batches that it evaluates. A signal that arrives
while a program is compiled waits for the end of its compilation; a second one ends the process.
"""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from transformer_jax.parallel.processes import maximum

TWICE_SECONDS = 0.25
"""Seconds in which a signal that arrives again is the same request."""


class StopRequest:
    """A request to stop.

    signal: the number of the signal that has arrived in this process, or 0. agreed: the number of
    the signal that all processes know to have arrived in one of them, or 0.
    """

    def __init__(self) -> None:
        self.signal = self.agreed = 0

    def cancelled(self) -> bool:
        """Returns whether a signal has arrived in any process, for which the processes ask each
        other: all of them must make the same calls."""
        self.agreed = self.agreed or maximum(self.signal)
        return self.agreed > 0


def end_by(number: int, _: Any = None) -> NoReturn:
    """Ends the program as one that a signal has stopped: KeyboardInterrupt for SIGINT, otherwise
    SystemExit with the status of a shell, 128 + `number`.

    It handles signals in a process whose launcher ends it when a second signal arrives there: a
    supervisor that signals all processes and a launcher that passes the signal on send it twice.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Sets the request at the first SIGINT or SIGTERM; a second signal has its default effect.

    A program such as timeout(1) sends a signal to a process and to its group, so that it arrives
    twice: within `TWICE_SECONDS` it is the same request. Outside the main thread, which alone
    handles signals, the request is never set.
    """
    request = StopRequest()

    def note(number: int, _: Any) -> None:
        if request.signal:
            return
        request.signal = number
        time.sleep(TWICE_SECONDS)
        # Python has noted, but not yet handled, a signal that arrived together with this one. It
        # would go to the handlers below; with any new signal Python also handles the noted one.
        signal.raise_signal(number)
        for name, handler in old.items():
            signal.signal(name, _second(handler))

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    old = {name: signal.signal(name, note) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for name, handler in old.items():
            signal.signal(name, handler)


def _second(handler: Any) -> Any:
    """Returns the handler of a second signal.

    A KeyboardInterrupt would first wait for the checkpoint that is being written. Only a session
    in which the user goes on needs that.
    """
    if handler is end_by:
        return signal.SIG_IGN
    interactive = hasattr(sys, "ps1")
    return signal.SIG_DFL if handler is signal.default_int_handler and not interactive else handler
