"""Traces steps of training with JAX's profiler."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import jax
from etils import epath

from transformer_jax.errors import UserError
from transformer_jax.files import AnyPath
from transformer_jax.training.step import Metrics


def check_profile(steps: int, run: AnyPath) -> None:
    """UserError: the number of steps is negative, or the run is in object storage."""
    if steps < 0:
        raise UserError(f"--profile={steps}: must be at least 0")
    if steps and isinstance(run, epath.Path):
        raise UserError(f"--profile={steps}: needs a run on a disk, not {run}")


@contextmanager
def profiler(folder: AnyPath, start: int, steps: int) -> Iterator[Callable[[int, Metrics], None]]:
    """Traces `steps` steps into `folder`, after three steps of compilation and warm-up.

    Yields a function to call with the number and the metrics of each step after step `start`.
    """
    with ExitStack() as running:

        def trace(step: int, metrics: Metrics) -> None:
            if steps and step == start + 3:
                running.enter_context(jax.profiler.trace(str(folder)))
            elif steps and step == start + 3 + steps:
                jax.block_until_ready(metrics)
                running.close()

        yield trace
