"""Runs training. Only this module, meter.py and signals.py read the clock or handle signals."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NamedTuple

import jax
from etils import epath

from transformer_jax.config import Config, DecodeConfig, differences
from transformer_jax.data.buckets import Shape
from transformer_jax.data.order import LATEST, describe_mixture
from transformer_jax.decoding import evaluation
from transformer_jax.decoding.loop import Cancelled
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.files import AnyPath, find_path
from transformer_jax.parallel.compile import REPLICATED, compile_function, compile_step
from transformer_jax.parallel.mesh import data_parallel_size, shard_batch
from transformer_jax.parallel.parameters import partition_tree
from transformer_jax.parallel.processes import (
    any_process,
    broadcast,
    is_coordinator,
    maximum,
    require_same_everywhere,
    share_errors,
    this_process,
    wait_for_all,
)
from transformer_jax.runs import checkpoint, lock, run
from transformer_jax.runs.card import Card
from transformer_jax.runs.checkpoint import Checkpoints
from transformer_jax.runs.run import Run
from transformer_jax.text import tokenizer
from transformer_jax.text.corpus import Corpora
from transformer_jax.training.costs import ideal_seconds_fn
from transformer_jax.training.meter import Meter, Origin, Sums
from transformer_jax.training.reporters import MetricsFile, Reporter
from transformer_jax.training.resume import (
    Progress,
    checkpoint_trees,
    existing_run,
    provenance,
    require_same_data,
    restored,
    source_of_params,
    with_params_of,
)
from transformer_jax.training.schedules import learning_rate
from transformer_jax.training.setup import (
    Setup,
    check_config,
    empty_batch,
    init_fn,
    prepare,
    update_fn,
)
from transformer_jax.training.signals import Stopped, StopRequest, end_by, stop_signals
from transformer_jax.training.step import Metrics, TrainState
from transformer_jax.training.validation import dev_loss_fn
from transformer_jax.types import Key

SAMPLES = 3
"""Number of translations shown with each evaluation."""

ASK_SECONDS = 2
"""Seconds of training between two steps at which processes ask each other for signals."""

APPEARS_WITHIN = 60.0
"""Seconds within which every process must see a run that process 0 has created."""


def train(
    config: Config,
    folder: epath.PathLike,
    *,
    new: bool = False,
    init_from: epath.PathLike | None = None,
    card: Card | None = None,
    profile: int = 0,
    reporters: Sequence[Reporter] = (),
) -> Run:
    """Trains `config` in the run folder, or continues the run in it, and returns the run.

    folder: on a disk, or gs://BUCKET/NAME. new: refuse to continue a run; the folder must be
    missing or empty. init_from: run whose parameters and tokenizer a new run starts with. card: of
    the run to train again, whose data must be the same. profile: number of steps to trace into the
    run's folder `profile`. reporters: functions that are called with every record.

    After SIGINT or SIGTERM, finishes the step, saves, and raises KeyboardInterrupt or SystemExit. A
    step that is still being compiled is given up. A second signal ends the process at once.
    UserError: the input is wrong; nothing has been written.
    """
    if profile < 0:
        raise UserError(f"--profile={profile}: must be at least 0")
    check_config(config)
    folder = find_path(folder)
    if profile and isinstance(folder, epath.Path):
        raise UserError(f"--profile={profile}: needs a run on a disk, not {folder}")
    old = existing_run(config, folder, new)
    saved = [] if old is None else checkpoint.steps(old.checkpoints)
    source = None if saved else source_of_params(old, init_from)
    corpora = Corpora.of(config.data)
    if card is not None:
        card.require_start(init_from)
        card.require_data(corpora)
    order = old.order if old is not None else card.order if card is not None else LATEST
    found = provenance(corpora, source, order)
    if old is not None:
        require_same_data(old, found)
    facts = found["file_digests"] | {"checkpoints of the run": ", ".join(map(str, saved)) or "none"}
    facts |= {} if old or source else tokenizer.digests(config.tokenizer)
    require_same_everywhere(config, facts)
    setup = prepare(config, old or source, corpora, order)
    made = Run(folder, config, setup.tokenizers, found if old is None else old.provenance)
    with _held(folder), stop_signals() as stop:
        end = _train(setup, made, old, source, profile, reporters, stop)
    if end.signal:
        end_by(end.signal)
    return made


def _train(
    setup: Setup,
    made: Run,
    old: Run | None,
    source: Run | None,
    profile: int,
    reporters: Sequence[Reporter],
    stop: StopRequest,
) -> End:
    """Creates the run, or continues `old`, and trains."""
    config, folder = made.config, made.folder
    init_key, key = jax.random.split(jax.random.key(config.train.seed))
    resumed = None if old is None else restored(old, setup)
    try:
        state, progress = resumed or (_initial_state(setup, init_key, stop), Progress())
    except Stopped:
        return End("stopped before the first step", stop.agreed())
    if source is not None and not resumed:  # another process may have saved meanwhile
        state = with_params_of(source, state, setup)
    metrics = MetricsFile(folder / "metrics.jsonl")
    if is_coordinator():
        if old is None:
            run.create(folder, config, made.tokenizers, made.provenance)
        else:
            run.update(old, config)
        step = int(state.step)
        every = 0 if old is None else old.config.train.log_every
        metrics.cut(step, expected=step - step % every if every else 0)
        reporters = [metrics, *reporters]
    else:
        reporters = ()
    wait_for_all("run")
    if any_process(not _appears(folder)):
        raise UserError(f"run {folder}: must be on storage that all processes share")
    checkpoints = Checkpoints(made.checkpoints, config.train.keep)
    with metrics, checkpoints:
        trainer = Trainer(setup, made, checkpoints, reporters, stop, metrics.flush)
        if old is not None and resumed:
            trainer.announce_resumption(old.config, int(state.step))
        return trainer.run(state, progress, key, profile)


@contextmanager
def _held(folder: AnyPath) -> Iterator[None]:
    """Holds the lock of the run in process 0. UserError: another training holds it."""
    with ExitStack() as stack:
        with share_errors():
            if is_coordinator():
                stack.enter_context(lock.locked(folder))
        yield


def _appears(folder: AnyPath) -> bool:
    """Waits for a run that process 0 has created: network file systems may show it later."""
    end = time.monotonic() + APPEARS_WITHIN
    while not run.exists(folder):
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
    return True


def _initial_state(setup: Setup, key: Key, stop: StopRequest) -> TrainState:
    rows = data_parallel_size(setup.mesh)
    specs = partition_tree(setup.abstract_state, setup.mesh)
    init = compile_function(init_fn(setup), setup.mesh, result=specs)
    return stop.checked(init)(key, empty_batch(Shape(rows, 2, 2)))


class End(NamedTuple):
    """Why training ends."""

    reason: str
    signal: int = 0  # that has stopped it; 0: it has finished


class Trainer:
    """Trains from a state until a limit of the config is reached or a stop is requested."""

    def __init__(
        self,
        setup: Setup,
        made: Run,
        checkpoints: Checkpoints,
        reporters: Sequence[Reporter],
        stop: StopRequest,
        flush_metrics: Callable[[], None],
    ) -> None:
        self.setup, self.config, self.folder = setup, setup.config, made.folder
        self.checkpoints, self.reporters, self.stop = checkpoints, reporters, stop
        self.flush_metrics = flush_metrics
        executor = setup.config.execution.executor
        specs = partition_tree(setup.abstract_state, setup.mesh)
        self.update = compile_step(
            update_fn(setup),
            setup.mesh,
            executor,
            result=(specs, REPLICATED),
            donate=True,
            deterministic=setup.config.execution.deterministic,
        )
        self.ideal_seconds = ideal_seconds_fn(setup)
        self.dev_loss = dev_loss_fn(setup.model, setup.config, setup.mesh, executor, stop.checked)
        greedy = dataclasses.replace(setup.config, decode=DecodeConfig(beam=1))
        self.translator = Translator(
            greedy, setup.tokenizers, {}, setup.mesh, cancelled=lambda: bool(stop.agreed())
        )
        self._asks_at = 0
        self._asked: tuple[int, float] | None = None  # the last step and its time

    def run(self, state: TrainState, progress: Progress, key: Key, profile: int) -> End:
        """Updates, evaluates, saves and reports until the end. UserError: training has diverged."""
        config, step = self.config.train, int(state.step)
        meter = self._meter(step, progress)
        self._announce(step)
        saved = step
        batches = self.setup.loader.batches(progress.position)
        update = self.stop.checked(self.update, each_call=False)
        with closing(batches), _profiler(self.folder / "profile", step, profile) as trace:
            while True:
                better = False
                if step % config.evaluate_every == 0:
                    better = self._evaluate(state, step, progress, meter)
                end = self._end(step, progress)
                if end:
                    better = self._evaluate(state, step, progress, meter) or better
                    end = self._stopped() or end  # a signal has ended the last evaluation
                if better or (saved < step and (end or step % config.save_every == 0)):
                    self._save(state, step, progress, meter, better)
                    saved = step
                if end:
                    break
                name = self.setup.loader.describe(progress.position)
                position, batch, drawn = next(batches)
                placed = shard_batch(batch, self.setup.mesh)
                try:
                    with meter.dispatching(batch):
                        state, metrics = update(state, placed, key)
                except Stopped:
                    continue  # to the end, which the processes have agreed on
                progress.position = position
                step += 1
                ideal = self.ideal_seconds(placed) if self.ideal_seconds else 0.0
                origin = Origin(name, self.setup.loader.epoch(position), drawn)
                meter.add(step, metrics, batch, origin, ideal)
                trace(step, metrics)
                progress.seconds = meter.seconds()
            self.checkpoints.wait()
        self._report("message", step, text=f"step {step}: {end.reason}; run {self.folder}")
        return end

    def _meter(self, step: int, progress: Progress) -> Meter:
        config, share = self.config, self._share(step, progress)

        def emit(step: int, drawn: Sequence[int], **values: Any) -> None:
            names = self.config.data.train
            if len(names) > 1:
                pairs: Counter[str] = Counter()
                for name, count in zip(names, drawn, strict=True):
                    pairs[name] += count  # a corpus may be named twice
                values["pairs"] = dict(pairs)
            share = self._share(step, progress)
            left = meter.seconds_left(share)
            self._report("train", step, done=share, seconds_left=left, **values)

        rate = learning_rate(config.optimizer, config.model.d_model)
        sums = Sums(**progress.sums)
        meter = Meter(
            rate,
            config.train.log_every,
            progress.seconds,
            share,
            sums,
            emit,
            say=lambda step, text: self._report("message", step, text=text),
            max_skipped=config.train.max_skipped,
        )
        return meter

    def _announce(self, step: int) -> None:
        setup = self.setup
        sizes = [f"{s.rows}x{s.source}x{s.target}" for s in setup.loader.shapes]
        texts = [
            f"corpus: {setup.examples.report}",
            f"batches: {setup.loader.batches_per_epoch} an epoch, "
            f"{setup.loader.non_padding_fraction:.1%} of slots filled, "
            f"{len(sizes)} shapes (rows x source x target): {', '.join(sizes)}",
            f"devices: {setup.describe_devices()}",
            "compiling: the training step, at the first batch of each shape; values follow every "
            f"{self.config.train.log_every} steps",
            *describe_mixture(setup.examples.sizes, self.config.data),
        ]
        texts += [
            f"{name}: {dev.examples.report}"
            for name, dev in setup.dev.items()
            if dev.examples.report.left_out
        ]
        for text in texts:
            self._report("message", step, text=text)

    def announce_resumption(self, old: Config, step: int) -> None:
        """Reports that the run continues at `step`, and the fields of `old` that have changed."""
        changed = differences(old, self.config, all_fields=True)
        text = f"continuing run {self.folder} at step {step}"
        text += f"; changed: {'; '.join(changed)}" if changed else ""
        self._report("message", step, text=text)

    def _end(self, step: int, progress: Progress) -> End | None:
        """Returns why training ends, the same in all processes; None: train on."""
        config = self.config.train
        asks = self._asks_others(step)
        if stopped := self._stopped(asks):
            return stopped
        if asks:
            self._plan_asking(step)
        if config.patience and progress.evaluations_since_best >= config.patience:
            return End(f"no better score in train.patience={config.patience} evaluations")
        if config.steps and step >= config.steps:
            return End(f"reached train.steps={config.steps}")
        if config.epochs and self.setup.loader.epoch(progress.position) >= config.epochs:
            return End(f"reached train.epochs={config.epochs}")
        if asks and config.minutes and broadcast(progress.seconds >= 60 * config.minutes):
            return End(f"reached train.minutes={config.minutes:g}")
        return None

    def _asks_others(self, step: int) -> bool:
        """Returns whether this is a step at which processes agree on a stop: each one if there is
        one process, else one about every `ASK_SECONDS`, since devices wait meanwhile."""
        return this_process()[1] == 1 or step >= self._asks_at

    def _plan_asking(self, step: int) -> None:
        """Sets the step at which processes ask again, by the pace since they last did.

        They have just asked, for which devices have finished all steps.
        """
        if this_process()[1] == 1:
            return
        before, self._asked = self._asked, (step, time.monotonic())
        self._asks_at = step + 1
        if before is not None and before[0] < step:
            steps, seconds = (now - then for now, then in zip(self._asked, before, strict=True))
            pace = maximum(round(1000 * seconds / steps))  # milliseconds a step
            self._asks_at = step + max(1, 1000 * ASK_SECONDS // max(pace, 1))

    def _stopped(self, ask: bool = True) -> End | None:
        """Returns the end that a signal to any process asks for."""
        if number := self.stop.agreed(ask):
            name = signal.Signals(number).name
            return End(f"stopped by {name}; the same command continues from here", number)
        return None

    def _share(self, step: int, progress: Progress) -> float:
        """Returns the fraction of training that is done, by the limit that comes first."""
        config, loader = self.config.train, self.setup.loader
        shares = [
            step / config.steps if config.steps else 0,
            step / (config.epochs * loader.batches_per_epoch) if config.epochs else 0,
            progress.seconds / (60 * config.minutes) if config.minutes else 0,
        ]
        return min(float(max(shares)), 1.0)

    def _save(
        self, state: TrainState, step: int, progress: Progress, meter: Meter, best: bool
    ) -> None:
        meter.settle()
        progress.seconds, progress.sums = meter.seconds(), dataclasses.asdict(meter.sums())
        self.flush_metrics()  # a run continued from this checkpoint does not write them again
        trees = checkpoint_trees(state)
        self.checkpoints.save(step, trees, dataclasses.asdict(progress), best=best)

    def _evaluate(self, state: TrainState, step: int, progress: Progress, meter: Meter) -> bool:
        """Scores the development corpora, at most once per step.

        Returns whether the score on the first one is the best so far.
        """
        if not self.setup.dev or progress.evaluated == step or self.stop.agreed():
            return False
        try:
            with meter.paused():
                scores, samples = self._scores(state)
        except (Stopped, Cancelled):
            return False
        first = next(iter(scores.values()))
        score = first["bleu"] if self.config.train.best == "bleu" else -first["loss"]
        better = progress.best is None or score > progress.best
        progress.best = score if better else progress.best
        scheduled = step % self.config.train.evaluate_every == 0  # not only because training ends
        since = progress.evaluations_since_best + scheduled
        progress.evaluations_since_best = 0 if better else since
        progress.evaluated = step
        self._report("evaluation", step, sets=scores, best=better, samples=samples[:SAMPLES])
        return better

    def _scores(self, state: TrainState) -> tuple[dict[str, dict[str, float]], list[Any]]:
        """Returns scores by corpus, and sample translations. Stopped: a stop is requested."""
        translator = self.translator.with_params(state.eval_params)
        scores: dict[str, dict[str, float]] = {}
        samples: list[Any] = []
        for name, dev in self.setup.dev.items():
            losses = self.dev_loss(state.eval_params, dev.examples)
            outputs = translator(dev.sources)
            scores[name] = losses | {"bleu": evaluation.score(outputs, dev.references)["bleu"]}
            samples += list(zip(dev.sources, outputs, dev.references, strict=True))[:SAMPLES]
        return scores, samples

    def _report(self, kind: str, step: int, **values: Any) -> None:
        for reporter in self.reporters:
            reporter({"kind": kind, "step": step, **values})


@contextmanager
def _profiler(folder: AnyPath, start: int, steps: int) -> Iterator[Callable[[int, Metrics], None]]:
    """Traces `steps` steps into `folder`, after three steps of compilation and warm-up."""
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
