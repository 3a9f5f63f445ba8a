"""The training loop: the only room with a clock, signals and log files."""

from __future__ import annotations

import dataclasses
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from transformer_jax import checkpoint, corpus, data, evaluate, parallel, run
from transformer_jax.checkpoint import Checkpoints
from transformer_jax.config import Config, DecodeConfig, differences
from transformer_jax.model import abstract_params
from transformer_jax.optim import schedule
from transformer_jax.prepare import Setup, empty_batch, init_fn, prepare, update_fn
from transformer_jax.reporting import MetricsFile, Reporter
from transformer_jax.run import Run
from transformer_jax.step import Metrics, TrainState
from transformer_jax.translate import Translator
from transformer_jax.types import Batch, Key

logger = logging.getLogger(__name__)

SAMPLES = 3
"""Translations shown with each evaluation."""

POLL = 256
"""Sentences translated between two looks at whether the process is asked to stop."""


@dataclass
class Progress:
    """What a run must remember to go on, beside its `TrainState`."""

    position: int = 0  # of the next batch in the data
    seconds: float = 0.0  # of training, all sittings together
    best: float | None = None  # best development score so far; higher is better
    stale: int = 0  # evaluations since then
    evaluated: int = 0  # step of the last evaluation


def train(
    config: Config,
    folder: str | Path,
    *,
    restart: bool = False,
    init_from: str | Path | None = None,
    profile: int = 0,
    reporters: Sequence[Reporter] = (),
) -> Run:
    """Trains `config` in the run folder, or continues the run that is there.

    restart: begin anew, in a missing or empty folder. init_from: a run whose weights and tokenizer
    to begin with. profile: trace so many steps into the folder `profile`. reporters: called with
    every record. ValueError: bad input, before anything is written.
    """
    if profile < 0:
        raise ValueError(f"--profile={profile}: must be at least 0")
    folder = Path(folder)
    old = _old_run(config, folder, restart)
    source = run.load(Path(init_from)) if init_from is not None and old is None else None
    made_from = _made_from(config)
    if old is not None:
        _require_same_data(old, made_from)
    setup = prepare(config, old or source)
    init_key, key = jax.random.split(jax.random.key(config.train.seed))
    small = empty_batch(data.Shape(1, 2, 2))
    state = parallel.compile(init_fn(setup), setup.mesh)(init_key, small)
    progress = Progress()
    if source is not None:
        state = _with_weights(state, source, setup)
    if old is None:
        made = run.create(folder, config, setup.tokenizers, made_from)
    else:
        state, progress = _restore(old, state, progress, setup)
        made = run.update(old, config)
    metrics = MetricsFile(folder / "metrics.jsonl")
    metrics.cut(int(state.step))
    with Checkpoints(made.checkpoints, config.train.keep) as checkpoints, _stop_signals() as asked:
        sitting = _Sitting(setup, made, checkpoints, [metrics, *reporters], asked)
        sitting.run(state, progress, key, profile)
    return made


class _Sitting:
    """Training from start or continuation to an end."""

    def __init__(
        self,
        setup: Setup,
        made: Run,
        checkpoints: Checkpoints,
        reporters: Sequence[Reporter],
        asked: list[str],
    ) -> None:
        self.setup, self.config, self.folder = setup, setup.config, made.folder
        self.checkpoints, self.reporters, self.asked = checkpoints, reporters, asked
        how = setup.config.execution.executor
        self.update = parallel.compile(update_fn(setup), setup.mesh, how, donate=True)
        self.dev_loss = evaluate.dev_loss_fn(setup.model, setup.config, setup.mesh, how)
        greedy = dataclasses.replace(setup.config, decode=DecodeConfig(beam=1))
        self.translator = Translator(greedy, setup.tokenizers, {}, setup.mesh)

    def run(self, state: TrainState, progress: Progress, key: Key, profile: int) -> None:
        """Updates until an end is reached or the process is asked to stop."""
        config, step = self.config.train, int(state.step)
        emit = partial(self._report_step, progress)
        meter = Meter(self.config, progress.seconds, emit)
        self._announce(step)
        saved = step
        batches = data.prefetch(self.setup.loader.batches(progress.position))
        with closing(batches), _profiler(self.folder / "profile", step, profile) as trace:
            while True:
                better = False
                if step % config.evaluate_every == 0:
                    better = self._evaluate(state, step, progress, meter)
                over = self._end(step, progress)
                if over:
                    better = self._evaluate(state, step, progress, meter) or better
                if better or (saved < step and (over or step % config.save_every == 0)):
                    meter.settle()
                    progress.seconds = meter.seconds()
                    self.checkpoints.save(
                        step, _trees(state), dataclasses.asdict(progress), best=better
                    )
                    saved = step
                if over:
                    break
                progress.position, batch = next(batches)
                placed = parallel.put(batch, self.setup.mesh)
                state, metrics = self.update(state, placed, key)
                step += 1
                meter.add(step, metrics, batch)
                trace(step, metrics)
                progress.seconds = meter.seconds()
            self.checkpoints.wait()
        self._report("message", step, text=f"step {step}: {over}; run {self.folder}")

    def _announce(self, step: int) -> None:
        setup = self.setup
        sizes = [f"{s.rows}x{s.source}x{s.target}" for s in setup.loader.shapes]
        texts = [
            f"corpus: {setup.examples.report}",
            f"batches: {setup.loader.batches_per_epoch} an epoch, {setup.loader.fill:.1%} filled, "
            f"{len(sizes)} shapes (rows x source x target): {', '.join(sizes)}",
            f"devices: {setup.mesh.devices.size} {jax.devices()[0].device_kind}",
        ]
        texts += [
            f"{name}: {dev.examples.report}"
            for name, dev in setup.dev.items()
            if dev.examples.report.left_out
        ]
        if step:
            texts.append(f"continuing run {self.folder} at step {step}")
        for text in texts:
            self._report("message", step, text=text)

    def _end(self, step: int, progress: Progress) -> str | None:
        """Why training is over, if it is."""
        config = self.config.train
        if self.asked:
            return f"stopped by {self.asked[0]}; the same command goes on from here"
        if config.patience and progress.stale >= config.patience:
            return f"no better score in train.patience={config.patience} evaluations"
        if config.steps and step >= config.steps:
            return f"reached train.steps={config.steps}"
        if config.epochs and self.setup.loader.epoch(progress.position) >= config.epochs:
            return f"reached train.epochs={config.epochs}"
        if config.minutes and progress.seconds >= 60 * config.minutes:
            return f"reached train.minutes={config.minutes:g}"
        return None

    def _share(self, step: int, progress: Progress) -> float:
        """The share of the way to the nearest end that is done."""
        config, loader = self.config.train, self.setup.loader
        shares = [
            step / config.steps if config.steps else 0,
            step / (config.epochs * loader.batches_per_epoch) if config.epochs else 0,
            progress.seconds / (60 * config.minutes) if config.minutes else 0,
        ]
        return min(max(shares), 1.0)

    def _evaluate(self, state: TrainState, step: int, progress: Progress, meter: Meter) -> bool:
        """Development scores, once a step; True if the first corpus' is the best so far."""
        if not self.setup.dev or self.asked or progress.evaluated == step:
            return False
        translator = self.translator.with_weights(state.weights)
        with meter.paused():
            scores, samples = {}, []
            for name, dev in self.setup.dev.items():
                losses = self.dev_loss(state.weights, dev.examples, self._go_on)
                lines = translator.stream(dev.sources, POLL)
                outputs = list(takewhile(self._go_on, lines))
                if self.asked:
                    return False
                scores[name] = losses | {"bleu": evaluate.score(outputs, dev.references)["bleu"]}
                samples += list(zip(dev.sources, outputs, dev.references, strict=True))[:SAMPLES]
        first = next(iter(scores.values()))
        score = first["bleu"] if self.config.train.best == "bleu" else -first["loss"]
        better = progress.best is None or score > progress.best
        progress.best = score if better else progress.best
        regular = step % self.config.train.evaluate_every == 0  # not one that an end has added
        progress.stale = 0 if better else progress.stale + regular
        progress.evaluated = step
        self._report("evaluation", step, sets=scores, best=better, samples=samples[:SAMPLES])
        return better

    def _go_on(self, _: Any) -> bool:
        return not self.asked

    def _report_step(self, progress: Progress, step: int, **values: float) -> None:
        share = self._share(step, progress)
        left = None if share == 0 else progress.seconds * (1 - share) / share
        epoch = self.setup.loader.epoch(progress.position)
        self._report("train", step, epoch=epoch, done=share, seconds_left=left, **values)

    def _report(self, kind: str, step: int, **values: Any) -> None:
        for reporter in self.reporters:
            reporter({"kind": kind, "step": step, **values})


class Meter:
    """Rates and means over the steps since the last record.

    A step's metrics are fetched while the next one runs, so that the device never waits.
    """

    def __init__(self, config: Config, seconds: float, emit: Callable[..., None]) -> None:
        self._schedule = schedule(config.optimizer, config.model.d_model)
        self._every, self._emit = config.train.log_every, emit
        self._started = time.monotonic() - seconds
        self._pending: tuple[int, Metrics, Batch] | None = None
        self._restart()

    def seconds(self) -> float:
        """Seconds of training in all sittings."""
        return time.monotonic() - self._started

    def add(self, step: int, metrics: Metrics, batch: Batch) -> None:
        """Takes note of a step that has been dispatched, and settles the one before it."""
        self.settle()
        self._pending = step, metrics, batch

    def settle(self) -> None:
        """Waits for the last step. ValueError: its loss is not a finite number."""
        if self._pending is None:
            return
        (step, metrics, batch), self._pending = self._pending, None
        # Waiting can be interrupted, fetching cannot.
        values = jax.device_get(jax.block_until_ready(metrics))
        loss, grad_norm = float(values["loss"]), float(values["grad_norm"])
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            raise ValueError(
                f"step {step}: loss={loss} with gradient norm {grad_norm}: training has diverged; "
                "lower optimizer.learning_rate, raise optimizer.warmup or set optimizer.clip_norm"
            )
        targets, sources = (np.count_nonzero(ids) for ids in (batch.target_out, batch.source))
        slots = batch.target_out.size + batch.source.size
        self._sums += np.array([1, loss, grad_norm, targets, targets + sources, slots])
        if step % self._every == 0:
            self._record(step)

    def _record(self, step: int) -> None:
        steps, loss, grad_norm, targets, real, slots = self._sums.tolist()
        self._emit(
            step,
            loss=loss / steps,
            grad_norm=grad_norm / steps,
            lr=float(np.asarray(self._schedule(step - 1))),
            tokens_per_s=targets / (time.monotonic() - self._since),
            fill=real / slots,
            minutes=self.seconds() / 60,
        )
        self._restart()

    def _restart(self) -> None:
        self._since, self._sums = time.monotonic(), np.zeros(6)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count in the rates (it does in the minutes)."""
        self.settle()
        began = time.monotonic()
        yield
        self._since += time.monotonic() - began


def _old_run(config: Config, folder: Path, restart: bool) -> Run | None:
    """The run to continue. ValueError: it has another config, or `restart` would overwrite it."""
    if not run.exists(folder):
        return None
    if restart:
        raise ValueError(f"run {folder}: is not empty; --restart needs a new or empty folder")
    old = run.load(folder)
    if changed := differences(old.config, config):
        raise ValueError(
            f"run {folder}: has another config ({'; '.join(changed)}); "
            "give the same config to continue, or name another folder"
        )
    return old


def _with_weights(state: TrainState, source: Run, setup: Setup) -> TrainState:
    """The new state with the weights of another run. ValueError: names every mismatch."""
    try:
        weights = source.weights(like=abstract_params(setup.model))
    except ValueError as error:
        raise ValueError(f"--init-from {source.folder}: {error}") from error
    params = parallel.replicate(weights, setup.mesh)
    average = None if state.ema is None else jax.tree.map(jax.numpy.copy, params)
    return state._replace(params=params, ema=average)


def _trees(state: TrainState) -> dict[str, Any]:
    """The state as a checkpoint holds it: what translates, and the rest."""
    rest = state._asdict()
    weights = rest.pop("params" if state.ema is None else "ema")
    return {"weights": weights, "training": {k: v for k, v in rest.items() if v is not None}}


def _restore(
    old: Run, state: TrainState, progress: Progress, setup: Setup
) -> tuple[TrainState, Progress]:
    """The newest whole checkpoint; a damaged one is named and stepped over."""
    steps = checkpoint.steps(old.checkpoints)
    for step in reversed(steps):
        try:
            trees = {
                name: checkpoint.restore(old.checkpoints, step, name, like)
                for name, like in _trees(state).items()
            }
            known = Progress(**checkpoint.progress(old.checkpoints, step))
        except ValueError as error:
            if step == steps[0]:
                raise
            logger.warning("%s; going on from the checkpoint before it", error)
            continue
        weights = {"params" if state.ema is None else "ema": trees["weights"]}
        return state._replace(**trees["training"], **weights), known
    return state, progress


def _made_from(config: Config) -> dict[str, Any]:
    """What a run was made with and from: enough to make it again."""
    options = config.data
    return {
        "versions": run.versions(),
        "data_digests": {
            "train": {name: corpus.digest(name, "train") for name in options.train},
            "dev": {name: corpus.digest(name, "validation") for name in options.dev},
        },
    }


def _require_same_data(old: Run, made_from: dict[str, Any]) -> None:
    """ValueError: a corpus has changed since the run began."""
    for split, digests in made_from["data_digests"].items():
        known = old.made_from.get("data_digests", {}).get(split, {})
        for name, digest in digests.items():
            if known.get(name, digest) != digest:
                raise ValueError(
                    f"data.{split}={name}: has changed since run {old.folder} began; give the same "
                    "data to continue, or name another folder"
                )


@contextmanager
def _stop_signals() -> Iterator[list[str]]:
    """Collects the names of SIGINT and SIGTERM; a second one acts as it does without us."""
    asked: list[str] = []

    def ask(number: int, _: Any) -> None:
        asked.append(signal.Signals(number).name)
        for name, handler in old.items():
            signal.signal(name, handler)

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    old = {name: signal.signal(name, ask) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for name, handler in old.items():
            signal.signal(name, handler)


@contextmanager
def _profiler(folder: Path, start: int, steps: int) -> Iterator[Callable[[int, Metrics], None]]:
    """Traces `steps` steps into `folder`, after three that compile and warm up."""
    running = False

    def trace(step: int, metrics: Metrics) -> None:
        nonlocal running
        if steps and step == start + 3:
            jax.profiler.start_trace(str(folder))
            running = True
        elif running and step >= start + 3 + steps:
            jax.block_until_ready(metrics)
            jax.profiler.stop_trace()
            running = False

    yield trace
    if running:
        jax.profiler.stop_trace()
