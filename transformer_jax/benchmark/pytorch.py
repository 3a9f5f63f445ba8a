"""PyTorch's attention as a peer, in processes of its own, with each of two memory allocators."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from transformer_jax.allocator import ALLOCATOR
from transformer_jax.benchmark import pytorch_worker
from transformer_jax.benchmark.cases import Case

ALLOCATORS = {"default": {}, "tuned": {"GLIBC_TUNABLES": ALLOCATOR}}
"""Environment of each worker: the C library's own settings, or those of `transformer-jax`."""


class Worker:
    """A process that runs PyTorch's attention. RuntimeError: it reports one, or has ended."""

    def __init__(self, environment: dict[str, str]) -> None:
        inherited = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", pytorch_worker.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=inherited | environment,
            start_new_session=True,  # Ctrl-C is for the parent alone, which then stops it
        )
        self.facts: dict[str, Any] = {}
        """PyTorch's version and the number of its threads, once something is loaded."""

    def load(self, case: Case, inputs: Sequence[jax.Array]) -> None:
        """Loads the inputs of a case."""
        self.facts = self.facts or self._reply()[0]
        options = {
            "device": "cuda" if jax.default_backend() == "gpu" else "cpu",
            "dtype": case.dtype,
            "causal": case.mask == "causal",
            "backward": case.direction == "both",
        }
        arrays = [np.asarray(x.astype(np.float32)) for x in inputs]
        self._request({"do": "load", "options": options}, arrays)

    def seconds_per_call(self, count: int) -> float:
        """Returns the mean seconds of `count` calls, timed in the worker."""
        return self._request({"do": "time", "count": count})[0]["seconds"]

    def run(self) -> list[np.ndarray]:
        """Returns the results in float32."""
        return self._request({"do": "run"})[1]

    def unload(self) -> None:
        """Frees the inputs."""
        self._request({"do": "unload"})

    def close(self) -> None:
        """Ends the process."""
        self._process.terminate()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def _request(
        self, message: dict[str, Any], arrays: Sequence[np.ndarray] = ()
    ) -> pytorch_worker.Message:
        stream = self._process.stdin
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):  # no reply follows
            pytorch_worker.send(stream, message, arrays)
        return self._reply()

    def _reply(self) -> pytorch_worker.Message:
        stream = self._process.stdout
        assert stream is not None
        reply = pytorch_worker.receive(stream)
        if reply is None:
            raise RuntimeError(f"PyTorch's process ended with status {self._process.wait()}")
        if "error" in reply[0]:
            raise RuntimeError(reply[0]["error"])
        return reply


@contextlib.contextmanager
def workers() -> Iterator[dict[str, Worker]]:
    """Starts a worker for each allocator, by its name; none where PyTorch cannot be compared.

    On a GPU the host's allocator does not matter, and there is one worker.
    """
    with contextlib.ExitStack() as stack:
        started: dict[str, Worker] = {}
        for name in _allocators():
            started[name] = Worker(ALLOCATORS[name])
            stack.callback(started[name].close)
        yield started


def _allocators() -> list[str]:
    """Returns the names of the allocators to compare on this platform."""
    if importlib.util.find_spec("torch") is None or jax.default_backend() == "tpu":
        return []
    on_glibc = sys.platform == "linux" and jax.default_backend() == "cpu"
    return list(ALLOCATORS) if on_glibc else ["default"]
