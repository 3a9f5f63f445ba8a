"""Coordinates the processes of a run. No other module asks JAX for the process index.

The coordinator is process 0. A single process is its own coordinator. All processes must call the
functions of this module in the same order, in their main thread.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from transformer_jax.config import Config, differences, from_json, to_json
from transformer_jax.errors import UserError
from transformer_jax.files import exit_now

JOIN_TIMEOUT = 300
"""Seconds to wait for the other processes at the start."""

HEARTBEAT_TIMEOUT = 150
"""Seconds after which a process that sends no heartbeat is taken for dead, and the others end. JAX
sends two in this time, so that a process which is stopped for a minute is waited for."""

LEAVE_TIMEOUT = 5
"""Seconds that a process which fails waits for the others to end, too."""

SOON = 0.5
"""Seconds that a process which a user interrupts waits for its own threads."""

MEETING_SECONDS = 2
"""Seconds of training between two steps at which processes exchange values."""

Item = TypeVar("Item")


def join(coordinator: str, count: int | None, index: int | None) -> None:
    """Joins the processes of a run, before any other use of JAX.

    coordinator: HOST:PORT of process 0; "auto": address, count and index come from the environment
    of Slurm, Open MPI, Kubernetes or a TPU pod. If the others do not come within `JOIN_TIMEOUT`,
    the process ends with status 2. UserError: the environment names no coordinator, or its port
    is in use.
    """
    if index == 0:
        _require_free_port(coordinator)
    _mute_gloo()
    # JAX would abort with a stack trace, and cannot be interrupted by an exception.
    others = "the other processes" if index == 0 else "the coordinator"
    waited = f"--coordinator={coordinator}: waited {JOIN_TIMEOUT} seconds there for {others}"
    watch = _exit_after(JOIN_TIMEOUT, 2, f"transformer-jax: error: {waited}\n")
    jax.config.update("jax_enable_preemption_service", False)  # which would ignore SIGTERM
    try:
        jax.distributed.initialize(
            None if coordinator == "auto" else coordinator,
            count,
            index,
            cluster_detection_method=None if coordinator == "auto" else "deactivate",
            initialization_timeout=JOIN_TIMEOUT + 60,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
        )
    except ValueError as error:
        raise UserError(
            f"--coordinator={coordinator}: {str(error).rstrip('.')}; give --coordinator=HOST:PORT"
        ) from error
    finally:
        watch.cancel()
    sys.excepthook = _fail


def leave(status: int, *, soon: bool = False) -> None:
    """Ensures that a process which fails ends with `status`, whether the others end or not.

    JAX lets a process that exits wait for all others for minutes. They may not know of the failure
    and wait for this one. If they do not come within `LEAVE_TIMEOUT`, this process ends without
    them, and they miss its heartbeat. soon: a single process does not wait longer than `SOON` for
    its threads, which may run programs.
    """
    several = jax.distributed.is_initialized()
    if several or soon:
        with suppress(OSError):
            sys.stdout.flush()
        _exit_after(LEAVE_TIMEOUT if several else SOON, status)


def end_now(status: int) -> NoReturn:
    """Ends this process without cleaning up, once the others end, too, or `LEAVE_TIMEOUT` is
    over."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if jax.distributed.is_initialized():
        _exit_after(LEAVE_TIMEOUT, status)
        jax.distributed.shutdown()
    exit_now(status)


def _require_free_port(coordinator: str) -> None:
    """Raises a UserError if the port cannot be opened; JAX would crash."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(coordinator.rpartition(":")[2])))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", error)
            raise UserError(f"--coordinator={coordinator}: {reason}; name a free port") from error


def _fail(_: type[BaseException], error: BaseException, __: TracebackType | None) -> None:
    """Prints the traceback of an exception that nothing has caught."""
    traceback.print_exception(error, file=sys.__stderr__)
    leave(1)


def _exit_after(seconds: float, status: int, message: str = "") -> threading.Timer:
    """Starts a timer that ends the process with a message, whatever the process does then."""

    def end() -> None:
        sys.stderr.write(message)
        sys.stderr.flush()
        exit_now(status)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer


def _mute_gloo() -> None:
    """Discards what C++ prints on standard output: Gloo tells there of its connections."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def this_process() -> tuple[int, int]:
    """Returns the index of this process and the number of processes."""
    return jax.process_index(), jax.process_count()


def is_coordinator() -> bool:
    """Returns whether this is the coordinator, which writes what only one process may write."""
    return jax.process_index() == 0


def broadcast(value: Any) -> Any:
    """Returns the coordinator's value, which JSON can hold, in every process.

    UserError: the coordinator has met an error inside `share_errors`.
    """
    return _send({"value": value})


def stream(items: Iterable[Item]) -> Iterator[Item]:
    """Yields the coordinator's items, which JSON can hold and which are not None, in every process.

    The other processes do not read `items`.
    """
    iterator = iter(items)
    while (item := broadcast(next(iterator, None) if is_coordinator() else None)) is not None:
        yield item


@contextmanager
def share_errors() -> Iterator[None]:
    """Raises a UserError or an OSError of the coordinator in all processes.

    Those errors must not occur elsewhere in the block than between two calls of `broadcast`, and
    nothing else in it may make the processes wait for each other while they can occur.
    """
    try:
        yield
        broadcast(None)  # all is well
    except (UserError, OSError) as error:
        if is_coordinator():
            _send({"error": str(error)})
        raise


def _send(message: dict[str, Any]) -> Any:
    """Returns the value in the coordinator's message; raises the error in it elsewhere."""
    if jax.process_count() == 1:
        return message.get("value")
    text = np.frombuffer(json.dumps(message).encode() if is_coordinator() else b"", np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    text = multihost_utils.broadcast_one_to_all(_padded(text, size))
    message = json.loads(np.asarray(text)[:size].tobytes())
    if "error" in message and not is_coordinator():
        raise UserError(message["error"])
    return message.get("value")


def gather(array: np.ndarray) -> np.ndarray:
    """Returns the arrays of all processes, one after the other along the first dimension."""
    if jax.process_count() == 1:
        return array
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(array))))
    parts = multihost_utils.process_allgather(_padded(array, max(sizes)))
    return np.concatenate([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _padded(array: np.ndarray, size: int) -> np.ndarray:
    """Returns the array with zeros after it, up to a power of two that is at least `size`: JAX
    compiles a program for each length."""
    padded = np.zeros((1 << max(int(size) - 1, 0).bit_length(), *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    return padded


def maximum(value: int) -> int:
    """Returns the largest value of all processes; all processes return the same."""
    if jax.process_count() == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


class Meetings:
    """Chooses the steps at which processes exchange values: each one if there is one process, else
    one about every `MEETING_SECONDS`, since the devices wait meanwhile."""

    def __init__(self) -> None:
        self._next = 0
        self._last: tuple[int, float] | None = None  # the last step chosen, and its time

    def due(self, step: int) -> bool:
        """Returns whether `step`, which comes after those asked before, is chosen.

        All processes return the same: they have agreed on the slowest pace at the last such step.
        """
        if jax.process_count() == 1:
            return True
        if step < self._next:
            return False
        before, self._last = self._last, (step, time.monotonic())
        self._next = step + 1
        if before is not None:
            steps, seconds = (now - then for now, then in zip(self._last, before, strict=True))
            pace = maximum(round(1000 * seconds / steps))  # milliseconds a step
            self._next = step + max(1, 1000 * MEETING_SECONDS // max(pace, 1))
        return True


def require_same_everywhere(config: Config, facts: dict[str, str]) -> None:
    """Checks that all processes have the same config and the same facts. UserError: one has not.

    facts: others that must be the same, such as the digests of files, by name. Only the folder of
    cached corpora and the number of threads may differ.
    """
    config = config.changed(data={"cache": "", "workers": 1})
    theirs = broadcast({"config": to_json(config), "facts": facts})
    changed = differences(from_json(theirs["config"]), config, all_fields=True)
    for name, fact in facts.items():
        if (wanted := theirs["facts"].get(name)) not in (None, fact):
            changed.append(f"{name}: {wanted[:12]} -> {fact[:12]}")
    if maximum(len(changed)):
        what = f"process {jax.process_index()} has another config or data than process 0"
        raise UserError(
            f"{what} ({'; '.join(changed)})" if changed else "a process has another config or data"
        )


def wait_for_all(name: str) -> None:
    """Waits until every process has called this function with the same `name`."""
    multihost_utils.sync_global_devices(name)
