"""PyTorch as a peer, in processes of its own, where no other library's threads run.

Imports no JAX, which such a process would otherwise import, too.
"""

import contextlib
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np

from transformer_jax.allocator import ALLOCATOR, give_memory_back
from transformer_jax.benchmark.timing import seconds_per_call

ALLOCATORS = {"default": {}, "tuned": {"GLIBC_TUNABLES": ALLOCATOR}}
"""Environment of each worker: the C library's own settings, or those of `transformer-jax`."""

Worker = Callable[..., Any]
"""Calls a method of a peer, such as `Attention`, in a process: (name, *arguments) -> result."""


@contextlib.contextmanager
def workers(platform: str, peer: Callable[[], Any]) -> Iterator[dict[str, Worker]]:
    """Starts a worker for each allocator, by its name, to compare with JAX on this platform.

    peer: what makes the object whose methods it calls.

    None where PyTorch cannot be compared. On a GPU the host's allocator does not matter, and there
    is one.
    """
    names = list(ALLOCATORS) if sys.platform == "linux" and platform == "cpu" else ["default"]
    if importlib.util.find_spec("torch") is None or platform == "tpu":
        names = []
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(worker(ALLOCATORS[name], peer)) for name in names}


@contextlib.contextmanager
def worker(environment: dict[str, str], peer: Callable[[], Any]) -> Iterator[Worker]:
    """Starts a process that ends with the context. Its calls raise RuntimeError if they fail, or if
    the process has ended."""
    with ProcessPoolExecutor(1, get_context("spawn"), _start, (peer,)) as pool:
        inherited = dict(os.environ)
        os.environ.pop("GLIBC_TUNABLES", None)
        os.environ.update(environment)
        try:
            pool.submit(_call, "unload").result()  # the process starts, with this environment
        finally:
            os.environ.clear()
            os.environ.update(inherited)
        yield lambda method, *arguments: pool.submit(_call, method, *arguments).result()


class Peer:
    """Times a call of PyTorch, which a subclass makes of what it loads."""

    def __init__(self) -> None:
        self.call: Callable[[], Any] = list

    def time(self, count: int) -> float:
        """Returns the mean seconds of `count` calls."""
        return seconds_per_call(self.call, count)

    def unload(self) -> None:
        """Frees what the call holds."""
        self.call = list
        give_memory_back()


class Attention(Peer):
    """Calls `scaled_dot_product_attention` on the inputs that it loads."""

    def load(
        self, arrays: list[np.ndarray], platform: str, dtype: str, mask: str, direction: str
    ) -> dict[str, Any]:
        """Loads query, key, value and the output's gradient, which are in float32.

        Returns PyTorch's version and the number of its threads.
        """
        torch: Any = importlib.import_module("torch")
        device, backward = "cuda" if platform == "gpu" else "cpu", direction == "both"
        inputs = [torch.from_numpy(x).to(device, getattr(torch, dtype)) for x in arrays]
        gradient = inputs.pop()
        options = {"is_causal": mask == "causal"}
        options["enable_gqa"] = inputs[0].shape[1] != inputs[1].shape[1]

        def call() -> list[Any]:
            leaves = [x.detach().requires_grad_() for x in inputs] if backward else inputs
            with torch.set_grad_enabled(backward):
                results = [torch.nn.functional.scaled_dot_product_attention(*leaves, **options)]
            if backward:
                results[0].backward(gradient)
                results += [x.grad for x in leaves]
            if device == "cuda":
                torch.cuda.synchronize()
            return results

        self.call = call
        return {"version": str(torch.__version__), "threads": torch.get_num_threads()}

    def run(self) -> list[np.ndarray]:
        """Returns the output and with the direction "both" the gradients, in float32."""
        return [x.detach().float().cpu().numpy() for x in self.call()]


_peers: list[Any] = []
"""The peer of a worker's process."""


def _start(peer: Callable[[], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the parent alone, which then ends it
    _peers.append(peer())


def _call(method: str, *arguments: Any) -> Any:
    """Calls a method in the worker's process. RuntimeError: it fails, whatever the error."""
    try:
        return getattr(_peers[0], method)(*arguments)
    except Exception as error:
        raise RuntimeError(str(error)) from None


@contextlib.contextmanager
def failure_in(record: dict[str, Any]) -> Iterator[None]:
    """Records the error of what does not run on this device or at this size."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        record["failed"] = " ".join(str(error).split())[:200]
