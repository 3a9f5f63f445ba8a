"""Measures training: means of the metrics, rates and the remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import numpy as np
import optax

from transformer_jax.special_ids import PAD
from transformer_jax.training.divergence import describe_skip, diverged, is_finite
from transformer_jax.training.step import Metrics
from transformer_jax.types import Batch


class Origin(NamedTuple):
    """Where a batch comes from."""

    name: str = ""  # its place in the data, for messages
    epoch: int = 0  # of the batch after it
    drawn: Sequence[int] = ()  # number of pairs from each corpus


@dataclass
class Sums:
    """What is summed between two records, and over the run; a checkpoint stores it."""

    steps: int = 0
    used: int = 0  # slots that hold tokens
    slots: int = 0
    ideal: float = 0.0  # seconds that the steps take at the peak of the devices
    seconds: float = 0.0  # that the steps have taken in earlier processes
    metrics: dict[str, float] = field(default_factory=dict)
    target_tokens: int = 0  # of the run
    skipped: int = 0  # steps of the run that have not updated
    skipped_in_row: int = 0  # the last of them
    drawn: list[int] = field(default_factory=list)  # pairs from each corpus


class Meter:
    """Sums the metrics of steps by name and emits their means every `log_every` steps.

    A step's metrics are fetched while the next one runs, so that the device never waits.
    seconds, share: training time of the run in earlier processes, and the fraction of training that
    they have done. sums: those that they have left. emit: called with the step and named values.
    say: called with a step that is skipped, since its loss or gradient is not finite, and a text.
    max_skipped: number of such steps in a row that ends training.
    """

    def __init__(
        self,
        learning_rate: optax.Schedule,
        log_every: int,
        seconds: float,
        share: float,
        sums: Sums,
        emit: Callable[..., None],
        say: Callable[[int, str], None],
        max_skipped: int,
    ) -> None:
        self._learning_rate, self._log_every, self._emit = learning_rate, log_every, emit
        self._say, self._max_skipped = say, max_skipped
        self._began, self._earlier, self._first_share = time.monotonic(), seconds, share
        self._compiling = 0.0  # seconds, in this process
        self._compiled: set[tuple[int, ...]] = set()
        self._pending: tuple[int, Metrics, Batch, Origin, float] | None = None
        self._since, self._sums = time.monotonic(), sums

    def sums(self) -> Sums:
        """Returns the sums since the last record."""
        return replace(self._sums, seconds=self._sum_seconds(), metrics=dict(self._sums.metrics))

    def seconds(self) -> float:
        """Returns the training time of the run in seconds, over all of its processes."""
        return self._earlier + self._elapsed()

    def seconds_left(self, share: float) -> float | None:
        """Estimates the remaining seconds, with a fraction `share` of training done; None: unknown.

        The estimate is the pace of this process, without the time that compilation took, since it
        does not recur.
        """
        done = share - self._first_share
        return None if done <= 0 else (self._elapsed() - self._compiling) * (1 - share) / done

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    @contextmanager
    def dispatching(self, batch: Batch) -> Iterator[None]:
        """Times the call of a step. The first call with a new batch shape compiles the step."""
        shape = (*np.shape(batch.source), *np.shape(batch.target_out))
        began = time.monotonic()
        yield
        if shape not in self._compiled:
            self._compiled.add(shape)
            self._compiling += time.monotonic() - began

    def add(
        self,
        step: int,
        metrics: Metrics,
        batch: Batch,
        origin: Origin,
        ideal: float = 0.0,
    ) -> None:
        """Settles the previous step, and keeps the metrics of the one just dispatched.

        ideal: seconds that the step's products take at the peak of the devices; 0: not known.
        """
        self.settle()
        self._pending = step, metrics, batch, origin, ideal

    def settle(self) -> None:
        """Waits for the last step and adds its metrics. UserError: training has diverged."""
        if self._pending is None:
            return
        (step, metrics, batch, origin, ideal), self._pending = self._pending, None
        # Waiting can be interrupted; fetching cannot.
        values = {k: float(v) for k, v in jax.device_get(jax.block_until_ready(metrics)).items()}
        before = self._sums.drawn or [0] * len(origin.drawn)
        self._sums.drawn = [a + b for a, b in zip(before, origin.drawn, strict=True)]
        if is_finite(values):
            self._add(values, batch, ideal)
        else:
            self._skip(step, values, batch, origin.name)
        if step % self._log_every == 0 and self._sums.steps:
            self._record(step, origin.epoch)

    def _add(self, values: dict[str, float], batch: Batch, ideal: float) -> None:
        sums = self._sums
        sums.steps += 1
        sums.skipped_in_row = 0
        sums.metrics = {k: sums.metrics.get(k, 0.0) + v for k, v in values.items()}
        sums.target_tokens += int(values["tokens"])
        sums.ideal += ideal
        sums.used += sum(int(np.sum(ids != PAD)) for ids in (batch.target_out, batch.source))
        sums.slots += np.size(batch.target_out) + np.size(batch.source)

    def _skip(self, step: int, values: dict[str, float], batch: Batch, where: str) -> None:
        """Counts a step that has not updated. UserError: there are too many in a row."""
        sums = self._sums
        sums.skipped, sums.skipped_in_row = sums.skipped + 1, sums.skipped_in_row + 1
        rows, length = np.shape(batch.source)
        name = f"{where}, {rows}x{length}x{np.shape(batch.target_out)[1]}"
        if sums.skipped_in_row >= self._max_skipped:
            raise diverged(step, values, name, sums.skipped_in_row, self._rate(step + 1))
        self._say(step, describe_skip(step, values, name, sums.skipped_in_row))

    def _rate(self, step: int) -> float:
        """Returns the learning rate of a step that updates: its schedule counts updates."""
        return float(np.asarray(self._learning_rate(step - 1 - self._sums.skipped)))

    def _record(self, step: int, epoch: int) -> None:
        sums, elapsed = self._sums, self._sum_seconds()
        means = {name: total / sums.steps for name, total in sums.metrics.items()}
        del means["tokens"]
        self._emit(
            step,
            epoch=epoch,
            **means,
            lr=self._rate(step),
            tokens_per_s=sums.metrics["tokens"] / elapsed,
            target_tokens=sums.target_tokens,
            **({"mfu": sums.ideal / elapsed} if sums.ideal else {}),
            padding=1 - sums.used / sums.slots,
            **({"skipped": sums.skipped} if sums.skipped else {}),
            minutes=self.seconds() / 60,
            drawn=sums.drawn,
        )
        self._since = time.monotonic()
        carried = {"target_tokens", "skipped", "skipped_in_row"}
        self._sums = Sums(**{name: getattr(sums, name) for name in carried})

    def _sum_seconds(self) -> float:
        """Returns the seconds that the summed steps have taken."""
        return self._sums.seconds + time.monotonic() - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time spent inside out of the rates, but not out of the minutes."""
        self.settle()
        began = time.monotonic()
        yield
        self._since += time.monotonic() - began
