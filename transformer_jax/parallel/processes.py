"""Coordinates the processes of a run. No other module asks JAX for the process index.

The coordinator is process 0. A single process is its own coordinator.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils


def this_process() -> tuple[int, int]:
    """Returns the index of this process and the number of processes."""
    return jax.process_index(), jax.process_count()


def is_coordinator() -> bool:
    """Returns whether this is the coordinator, which writes what only one process may write."""
    return jax.process_index() == 0


def broadcast(value: bool | int) -> int:
    """Returns the coordinator's value, a 32-bit integer, in every process."""
    if jax.process_count() == 1:
        return int(value)
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def any_process(flag: bool) -> bool:
    """Returns whether `flag` is true in any process; all processes return the same."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.bool_(flag))))


def wait_for_all(name: str) -> None:
    """Waits until every process has called this function with the same `name`."""
    multihost_utils.sync_global_devices(name)
