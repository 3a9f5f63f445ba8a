"""Measures training: means of the metrics, rates and the remaining time."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from transformer_jax.config import Config
from transformer_jax.data.loader import Loaded
from transformer_jax.errors import UserError
from transformer_jax.special_ids import PAD
from transformer_jax.training.schedules import learning_rate
from transformer_jax.training.step import Metrics
from transformer_jax.types import Batch


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
    """Sums the metrics of steps by name and reports their means every `train.log_every` steps.

    A step's metrics are fetched while the next one runs, so that the device never waits.
    batches_per_epoch: about as many as `train.epochs` has. report: called with "train", the step
    and named values, or with "message", a step that is skipped and its text. step, seconds, sums:
    the last step of earlier processes, the training time of the run in them, and what they have
    summed since the last record.
    """

    def __init__(
        self,
        config: Config,
        batches_per_epoch: int,
        report: Callable[..., None],
        step: int = 0,
        seconds: float = 0.0,
        sums: Sums | None = None,
    ) -> None:
        self._config, self._batches_per_epoch, self._report = config, batches_per_epoch, report
        self._learning_rate = learning_rate(config.optimizer, config.model.d_model)
        self._sums = sums or Sums()
        now = time.monotonic()  # from which earlier processes go back
        self._began, self._since = now - seconds, now - self._sums.seconds
        self._unpaced = seconds  # of earlier processes, and of compilation in this one
        self._compiled: set[tuple[int, ...]] = set()
        self._pending: tuple[int, Metrics, Loaded, float] | None = None
        self._first_share = self._share(step, seconds)

    def sums(self) -> Sums:
        """Returns the sums since the last record."""
        return replace(self._sums, seconds=time.monotonic() - self._since)

    def seconds(self) -> float:
        """Returns the training time of the run in seconds, over all of its processes."""
        return time.monotonic() - self._began

    def progress(self, step: int) -> tuple[float, float | None]:
        """Returns the fraction of training that is done, and the seconds that are left, if known.

        The estimate is the pace of this process, without the time that compilation took, since it
        does not recur.
        """
        share = self._share(step, self.seconds())
        done = share - self._first_share
        if done <= 0:
            return share, None
        return share, (self.seconds() - self._unpaced) * (1 - share) / done

    def _share(self, step: int, seconds: float) -> float:
        """Returns the fraction of training that is done, by the limit that comes first."""
        limits = self._config.train
        steps = (limits.steps, (limits.epochs or 0) * self._batches_per_epoch)
        shares = [step / limit for limit in steps if limit]
        shares += [seconds / (60 * limits.minutes)] if limits.minutes else []
        return min(float(max(shares)), 1.0)

    @contextmanager
    def dispatching(self, batch: Batch) -> Iterator[None]:
        """Times the call of a step. The first call with a new batch shape compiles the step, which
        is left out of the rates."""
        shape = (*np.shape(batch.source), *np.shape(batch.target_out))
        began = time.monotonic()
        yield
        if shape not in self._compiled:
            self._compiled.add(shape)
            self._unpaced += (seconds := time.monotonic() - began)
            self._since += seconds

    def add(self, step: int, metrics: Metrics, loaded: Loaded, ideal: float = 0.0) -> None:
        """Finishes the previous step, and keeps the metrics of the one just dispatched.

        ideal: seconds that the step's matmuls take at the peak of the devices; 0: unknown.
        """
        self.finish_step()
        self._pending = step, metrics, loaded, ideal

    def finish_step(self) -> None:
        """Waits for the last step and adds its metrics. UserError: training has diverged."""
        if self._pending is None:
            return
        (step, metrics, loaded, ideal), self._pending = self._pending, None
        # Waiting can be interrupted; fetching cannot.
        values = {k: float(v) for k, v in jax.device_get(jax.block_until_ready(metrics)).items()}
        before = self._sums.drawn or [0] * len(loaded.drawn)
        self._sums.drawn = [a + b for a, b in zip(before, loaded.drawn, strict=True)]
        if math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]):
            self._add(values, loaded.batch, ideal)
        else:
            self._skip(step, values, loaded)
        if step % self._config.train.log_every == 0 and self._sums.steps:
            self._record(step, loaded.epoch)

    def _add(self, values: dict[str, float], batch: Batch, ideal: float) -> None:
        sums = self._sums
        sums.steps += 1
        sums.skipped_in_row = 0
        sums.metrics = {k: sums.metrics.get(k, 0.0) + v for k, v in values.items()}
        sums.target_tokens += int(values["tokens"])
        sums.ideal += ideal
        sums.used += sum(int(np.sum(ids != PAD)) for ids in (batch.target_out, batch.source))
        sums.slots += np.size(batch.target_out) + np.size(batch.source)

    def _skip(self, step: int, values: dict[str, float], loaded: Loaded) -> None:
        """Counts a step that has not updated, since its loss or gradient is not finite.

        UserError: there are `train.max_skipped` of them in a row.
        """
        sums = self._sums
        sums.skipped, sums.skipped_in_row = sums.skipped + 1, sums.skipped_in_row + 1
        rows, length = np.shape(loaded.batch.source)
        text = (
            f"step {step}: loss={values['loss']} with gradient norm {values['grad_norm']} in "
            f"{loaded.name}, {rows}x{length}x{np.shape(loaded.batch.target_out)[1]}: skipped, "
            f"{sums.skipped_in_row} in a row"
        )
        if sums.skipped_in_row >= self._config.train.max_skipped:
            raise UserError(
                f"{text} (train.max_skipped), with learning rate {self._rate(step + 1):.3g}: "
                "training has diverged; lower optimizer.learning_rate, raise optimizer.warmup or "
                "set optimizer.clip_norm"
            )
        self._report("message", step, text=text)

    def _rate(self, step: int) -> float:
        """Returns the learning rate of a step that updates: its schedule counts updates."""
        return float(np.asarray(self._learning_rate(step - 1 - self._sums.skipped)))

    def _record(self, step: int, epoch: int) -> None:
        sums, elapsed = self._sums, time.monotonic() - self._since
        share, left = self.progress(step)
        values: dict[str, Any] = {name: x / sums.steps for name, x in sums.metrics.items()}
        del values["tokens"]
        if sums.ideal:
            values["mfu"] = sums.ideal / elapsed
        if sums.skipped:
            values["skipped"] = sums.skipped
        if len(names := self._config.data.train) > 1:
            pairs: Counter[str] = Counter()
            for name, count in zip(names, sums.drawn, strict=True):
                pairs[name] += count  # a corpus may be named twice
            values["pairs"] = dict(pairs)
        values |= {"lr": self._rate(step), "tokens_per_s": sums.metrics["tokens"] / elapsed}
        values |= {"target_tokens": sums.target_tokens, "padding": 1 - sums.used / sums.slots}
        values["minutes"] = self.seconds() / 60
        self._report("train", step, done=share, seconds_left=left, epoch=epoch, **values)
        self._since = time.monotonic()
        carried = {"target_tokens", "skipped", "skipped_in_row"}
        self._sums = Sums(**{name: getattr(sums, name) for name in carried})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time spent inside out of the rates, but not out of the minutes."""
        self.finish_step()
        began = time.monotonic()
        yield
        self._since += time.monotonic() - began
