"""Requests that training stop when the process receives SIGINT or SIGTERM.

Training stops between two steps, or before a program runs that it evaluates with. Neither tracing
nor XLA can be interrupted: a program is compiled in a thread, which is abandoned.
"""

from __future__ import annotations

import atexit
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, NoReturn

import jax
import numpy as np

from transformer_jax.parallel.processes import end_now, maximum

LOOK_SECONDS = 0.05
"""Seconds between two looks for a signal while a program is compiled."""

TWICE_SECONDS = 0.25
"""Seconds in which a signal that arrives again is the same request."""


class Stopped(BaseException):
    """A request to stop has been met before a program has run."""


class StopRequest:
    """A request to stop; `signal` is the number of the signal that has arrived, or 0."""

    def __init__(self) -> None:
        self.signal = 0
        self._agreed = 0

    def agreed(self, ask: bool = True) -> int:
        """Returns the signal that the processes know to have arrived in any of them, or 0.

        ask: whether they tell each other now; it must be the same in all.
        """
        if ask and not self._agreed:
            self._agreed = maximum(self.signal)
        return self._agreed

    def checked(
        self, function: Callable[..., Any], *, each_call: bool = True
    ) -> Callable[..., Any]:
        """Returns `function`, which `jit` compiles, with a check for requests before it runs.

        The second argument is a batch: the function is compiled for each of its shapes, which a
        signal ends at once. each_call: whether to check before each call, and then to wait for its
        result, or to check only before the first call with a new shape. The returned function
        raises Stopped, in all processes.
        """
        known: set[tuple[tuple[int, ...], ...]] = set()

        def run(*arguments: Any) -> Any:
            shapes = tuple(np.shape(leaf) for leaf in jax.tree.leaves(arguments[1]))
            new = shapes not in known
            if new and hasattr(function, "lower"):  # pmap's has none
                self._compile(function, arguments)
            if (new or each_call) and self.agreed():
                raise Stopped
            known.add(shapes)
            result = function(*arguments)
            return jax.block_until_ready(result) if each_call else result

        return run

    def _compile(self, function: Any, arguments: tuple[Any, ...]) -> None:
        """Compiles a function, so that calling it does not, until a signal arrives.

        The thread looks for a signal now and then. An exception from the handler of a signal could
        be lost, since Python drops those that are raised while it finalizes an object.
        """
        compiling: Future[Any] = Future()

        def compile() -> None:
            try:
                compiling.set_result(function.lower(*arguments).compile())
            except Exception as error:
                compiling.set_exception(error)

        thread = threading.Thread(target=compile, name="compile", daemon=True)
        thread.start()
        while not self.signal:
            if wait([compiling], timeout=LOOK_SECONDS).done:
                compiling.result()
                return
        atexit.register(_abandon, thread, 128 + self.signal)


def _abandon(thread: threading.Thread, status: int) -> None:
    """Ends the process if XLA still compiles, which would crash when Python cleans up."""
    if thread.is_alive():
        end_now(status)


def end_by(number: int) -> NoReturn:
    """Ends the program as one that a signal has stopped: KeyboardInterrupt for SIGINT, otherwise
    SystemExit with the status of a shell, 128 + `number`."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def ended_by_launcher(number: int, _: Any) -> NoReturn:
    """Handles a signal in a process whose launcher ends it when a second signal arrives there.

    A supervisor that signals all processes and a launcher that passes the signal on send it twice.
    """
    end_by(number)


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
    if handler is ended_by_launcher:
        return signal.SIG_IGN
    interactive = hasattr(sys, "ps1")
    return signal.SIG_DFL if handler is signal.default_int_handler and not interactive else handler
