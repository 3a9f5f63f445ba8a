"""Runs training: `train` plans and sets up a run, and `Trainer.run` is the loop."""

import dataclasses
import signal
from collections.abc import Sequence
from contextlib import closing
from functools import partial

import jax
from etils import epath

from transformer_jax.config import Config
from transformer_jax.files import find_path
from transformer_jax.parallel.mesh import shard_batch
from transformer_jax.parallel.processes import Meetings, broadcast, is_coordinator
from transformer_jax.runs import lock
from transformer_jax.runs.card import Card
from transformer_jax.runs.checkpoint import Checkpoints
from transformer_jax.runs.run import Run
from transformer_jax.training import resume
from transformer_jax.training.meter import Meter, Sums
from transformer_jax.training.planning import ideal_seconds_fn
from transformer_jax.training.profiler import check_profile, profiler
from transformer_jax.training.reporters import MetricsFile, Reporter, report
from transformer_jax.training.setup import Setup, check_config, set_up
from transformer_jax.training.signals import StopRequest, end_by, stop_signals
from transformer_jax.training.step import TrainState
from transformer_jax.training.validation import DevScores, Metric, check_metric, select_metric
from transformer_jax.types import Key


def train(
    config: Config,
    folder: epath.PathLike,
    *,
    new: bool = False,
    init_from: epath.PathLike | None = None,
    init_parts: Sequence[str] = (),
    new_vocabulary: bool = False,
    card: Card | None = None,
    profile: int = 0,
    metric: Metric | None = None,
    reporters: Sequence[Reporter] = (),
) -> Run:
    """Trains `config` in the run folder, or continues the run in it, and returns the run.

    folder: on a disk, or gs://BUCKET/NAME. new: refuse to continue a run; the folder must be
    missing or empty. init_from: run whose parameters and tokenizer a new run starts with.
    init_parts: which of these parameters, named as in `OptimizerConfig.frozen`; none: all.
    new_vocabulary: makes the tokenizer that the config describes, and takes over the embeddings of
    pieces. card: of the run to train again, whose data must be the same. profile: number of steps
    to trace into the run's folder `profile`. metric: scores translations in place of BLEU to select
    the best checkpoint; its name becomes `train.best`. reporters: functions that are called with
    every record.

    After SIGINT or SIGTERM, finishes the step, or the compilation of a program, saves, and raises
    KeyboardInterrupt or SystemExit. A second signal ends the process at once.
    UserError: the input is wrong; nothing has been written.
    """
    config = select_metric(config, metric)
    check_config(config)
    folder = find_path(folder)
    check_profile(profile, folder)
    options = {"init_from": init_from, "init_parts": init_parts, "new_vocabulary": new_vocabulary}
    start = resume.plan_start(config, folder, new=new, card=card, **options)
    setup = set_up(config, start.tokenizers, start.corpora)
    if metric is not None:
        check_metric(metric, setup.dev.values())
    run = Run(folder, config, setup.tokenizers, start.provenance)
    init_key, key = jax.random.split(jax.random.key(config.train.seed))
    with lock.locked(folder), stop_signals() as stop:
        state, progress, origin = resume.first_state(start, setup, init_key)
        step, metrics = int(state.step), MetricsFile(folder / "metrics.jsonl")
        resume.store_run(start, run, metrics, step, progress)
        with metrics, Checkpoints(run.checkpoints, config.train.keep) as checkpoints:
            reporters = [metrics, *reporters] if is_coordinator() else []
            for text in (*start.describe(run, step), *origin, *setup.describe()):
                report(reporters, "message", step, text=text)
            trainer = Trainer(setup, run, checkpoints, metrics, reporters, stop, metric)
            trainer.run(state, progress, key, profile)
    if stop.agreed:
        end_by(stop.agreed)
    return run


class Trainer:
    """Trains until a limit of the config is reached or a signal arrives."""

    state: TrainState
    step: int
    progress: resume.Progress
    meter: Meter

    def __init__(
        self,
        setup: Setup,
        run: Run,
        checkpoints: Checkpoints,
        metrics: MetricsFile,
        reporters: Sequence[Reporter],
        stop: StopRequest,
        metric: Metric | None = None,
    ) -> None:
        self.setup, self.config, self.folder = setup, setup.config, run.folder
        self.checkpoints, self.metrics, self.stop = checkpoints, metrics, stop
        self.report = partial(report, reporters)
        self.compute, self.apply = setup.compile_gradients(), setup.compile_apply()
        self.ideal_seconds = ideal_seconds_fn(setup)
        self.dev_scores = DevScores(setup, stop.cancelled, metric)
        self._on_host = setup.mesh.devices.flat[0].platform == "cpu"
        self._meetings = Meetings()
        self._unsaved = self._has_evaluated = False

    def run(self, state: TrainState, progress: resume.Progress, key: Key, profile: int = 0) -> None:
        """Updates, evaluates, saves and reports until the end. UserError: training has diverged."""
        self.state, self.step, self.progress = state, int(state.step), progress
        loader, sums = self.setup.loader, Sums(**progress.sums)
        self.meter = Meter(
            self.config, loader.batches_per_epoch, self.report, self.step, progress.seconds, sums
        )
        batches = loader.batches(progress.position)
        with closing(batches), profiler(self.folder / "profile", self.step, profile) as trace:
            while not (reason := self._between_steps()):
                loaded = next(batches)
                batch = shard_batch(loaded.batch, self.setup.mesh)
                if self._on_host:  # where each step that is dispatched has temporaries of its own
                    self.meter.finish_step()
                with self.meter.dispatching(loaded.batch):
                    # The gradient has no name, so that it is freed before the next one.
                    state = self.state
                    self.state, metrics = self.apply(state, *self.compute(state, batch, key))
                self.step += 1
                self._unsaved, progress.position = True, loaded.after
                self.meter.add(self.step, metrics, loaded, self.ideal_seconds(batch))
                trace(self.step, metrics)
            self.checkpoints.wait()
        self.report("message", self.step, text=f"step {self.step}: {reason}; run {self.folder}")

    def _between_steps(self) -> str:
        """Evaluates and saves if it is time. Returns why training ends; "": it goes on."""
        options, step = self.config.train, self.step
        saves = step % options.save_every == 0
        better = step % options.evaluate_every == 0 and self._evaluate(saves)
        if reason := self._reason_to_end():
            better = self._evaluate(saves=True) or better
            reason = self._signal() or reason  # one that has ended this evaluation
        if self._unsaved and (better or saves or reason):
            self._save(better)
        return reason

    def _reason_to_end(self) -> str:
        """Returns why training ends, the same in all processes; "": it goes on."""
        options, step, progress = self.config.train, self.step, self.progress
        meets = self._meetings.due(step)
        if (meets and self.stop.cancelled()) or self.stop.agreed:
            return self._signal()
        if options.patience and progress.evaluations_since_best >= options.patience:
            return f"no better score in train.patience={options.patience} evaluations"
        if options.steps and step >= options.steps:
            return f"reached train.steps={options.steps}"
        if options.epochs and self.setup.loader.epoch(progress.position) >= options.epochs:
            return f"reached train.epochs={options.epochs}"
        if meets and options.minutes and broadcast(self.meter.seconds() >= 60 * options.minutes):
            return f"reached train.minutes={options.minutes:g}"
        return ""

    def _signal(self) -> str:
        """Returns the reason to end that the processes have agreed on, if there is one."""
        if not self.stop.agreed:
            return ""
        name = signal.Signals(self.stop.agreed).name
        return f"stopped by {name}; the same command continues from here"

    def _save(self, best: bool = False) -> None:
        self.meter.finish_step()
        self.progress.seconds = self.meter.seconds()
        self.progress.sums = dataclasses.asdict(self.meter.sums())
        self.metrics.flush()  # a run continued from this checkpoint does not write them again
        trees, progress = resume.checkpoint_trees(self.state), dataclasses.asdict(self.progress)
        self.checkpoints.save(self.step, trees, progress, best=best)
        self._unsaved = False

    def _evaluate(self, saves: bool) -> bool:
        """Scores the development corpora, at most once per step.

        saves: whether this step is to be saved. Returns whether the score on the first corpus is
        the best so far.
        """
        progress, step = self.progress, self.step
        if not self.setup.dev or progress.evaluated == step or self.stop.cancelled():
            return False
        if saves and self._unsaved and not self._has_evaluated:
            self._save()  # the programs of the evaluation are compiled, which may take long
        self._has_evaluated = True
        with self.meter.paused():
            scored = self.dev_scores(self.state.eval_params, self._decodes())
        if scored is None:
            return False
        scores, samples = scored
        first, best = next(iter(scores.values())), self.config.train.best
        score = -first["loss"] if best == "loss" else first.get(best)
        if score is not None:
            # Not those that are made only because training ends.
            progress.evaluations_since_best += step % self.config.train.evaluate_every == 0
        better = score is not None and progress.improve(score, first["loss"])
        progress.evaluated, self._unsaved = step, True
        self.report("evaluation", step, sets=scores, best=better, samples=samples)
        return better

    def _decodes(self) -> bool:
        """Returns whether an evaluation at this step translates: one that is due, or one that is
        made because training ends."""
        options, step = self.config.train, self.step
        if options.decode_every is None:
            return False
        due = step % (options.evaluate_every * options.decode_every) == 0
        return due or step % options.evaluate_every != 0 or step == options.steps
