"""Coordinates the processes of a run. No other module asks JAX for the process index.

The coordinator is process 0. A single process is its own coordinator. All processes must call the
functions of this module in the same order, in their main thread.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from contextlib import suppress
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from transformer_jax.errors import UserError

JOIN_TIMEOUT = 300
"""Seconds to wait for the other processes at the start."""

HEARTBEAT_TIMEOUT = 30
"""Seconds after which a process that sends no heartbeat is taken for dead, and the others end."""

LEAVE_TIMEOUT = 5
"""Seconds that a process which fails waits for the others to end, too."""


def join(coordinator: str, count: int | None, index: int | None) -> None:
    """Joins the processes of a run, before any other use of JAX.

    coordinator: HOST:PORT of process 0; "auto": address, count and index come from the environment
    of Slurm, Open MPI, Kubernetes or a TPU pod. If the others do not come within `JOIN_TIMEOUT`,
    the process ends with status 2. UserError: the environment names no coordinator.
    """
    _mute_gloo()
    # JAX would abort with a stack trace, and cannot be interrupted by an exception.
    others = "the other processes" if index == 0 else "the coordinator"
    watch = _exit_after(
        JOIN_TIMEOUT,
        2,
        f"transformer-jax: error: --coordinator={coordinator}: waited {JOIN_TIMEOUT} seconds there "
        f"for {others}\n",
    )
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


def leave(status: int) -> None:
    """Ensures that a process which fails ends with `status`, whether the others end or not.

    JAX lets a process that exits wait for all others for minutes. They may not know of the failure
    and wait for this one. If they do not come within `LEAVE_TIMEOUT`, this process ends without
    them, and they miss its heartbeat. Does nothing in a single process.
    """
    if jax.distributed.is_initialized():
        with suppress(OSError):
            sys.stdout.flush()
        _exit_after(LEAVE_TIMEOUT, status)


def _fail(_: type[BaseException], error: BaseException, __: TracebackType | None) -> None:
    """Prints the traceback of an exception that nothing has caught."""
    traceback.print_exception(error, file=sys.__stderr__)
    leave(1)


def _exit_after(seconds: float, status: int, message: str = "") -> threading.Timer:
    """Starts a timer that ends the process with a message, whatever the process does then."""

    def end() -> None:
        sys.stderr.write(message)
        sys.stderr.flush()
        os._exit(status)

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
    """Returns the coordinator's value, which JSON can hold, in every process."""
    if jax.process_count() == 1:
        return value
    data = np.frombuffer(json.dumps(value).encode(), np.uint8) if is_coordinator() else None
    size = int(multihost_utils.broadcast_one_to_all(np.int32(0 if data is None else len(data))))
    data = np.zeros(size, np.uint8) if data is None else data
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(data)).tobytes())


def any_process(flag: bool) -> bool:
    """Returns whether `flag` is true in any process; all processes return the same."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.bool_(flag))))


def wait_for_all(name: str) -> None:
    """Waits until every process has called this function with the same `name`."""
    multihost_utils.sync_global_devices(name)
