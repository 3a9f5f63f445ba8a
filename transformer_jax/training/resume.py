"""Plans how training starts: it continues a run, or creates one, perhaps with the parameters of
another."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from transformer_jax.config import Config, differences, require_decided
from transformer_jax.data.order import VERSION
from transformer_jax.errors import UserError
from transformer_jax.files import AnyPath
from transformer_jax.models.parameter_paths import merge, restrict
from transformer_jax.parallel import processes
from transformer_jax.runs import checkpoint, manifest
from transformer_jax.runs import run as runs
from transformer_jax.runs.card import Card, require_start
from transformer_jax.runs.run import Run
from transformer_jax.text import tokenizer
from transformer_jax.text.corpus import Corpora
from transformer_jax.training.initialization import params_from
from transformer_jax.training.reporters import MetricsFile, last_step, whole_records
from transformer_jax.training.setup import Setup
from transformer_jax.training.step import TrainState
from transformer_jax.types import Key

logger = logging.getLogger(__name__)

APPEARS_WITHIN = 60.0
"""Seconds within which every process must see a run that process 0 has created."""


@dataclass
class Progress:
    """What a checkpoint stores besides the `TrainState`, to continue the run."""

    position: int = 0  # of the next batch in the data
    seconds: float = 0.0  # of training in all processes of the run
    best: float | None = None  # best development score so far; higher is better
    best_loss: float = math.inf  # the development loss there
    evaluations_since_best: int = 0
    evaluated: int = 0  # step of the last evaluation
    sums: dict[str, Any] = field(default_factory=dict)  # of the meter, since the last record

    def improve(self, score: float, loss: float) -> bool:
        """Takes the score and the loss of an evaluation, and returns whether it is the best so far.

        Of equal scores, such as a BLEU of 0, the one with the lower loss is better.
        """
        rank = [-math.inf if math.isnan(x) else x for x in (score, -loss)]
        better = self.best is None or rank > [self.best, -self.best_loss]
        if better:
            self.best, self.best_loss, self.evaluations_since_best = rank[0], -rank[1], 0
        return better


@dataclass(frozen=True)
class Start:
    """How training starts."""

    continued: Run | None  # the run in the folder, with its config as it is stored
    source: Run | None  # run with whose parameters training starts; None: random ones
    parts: tuple[str, ...]  # which of them; none: all
    new_vocabulary: bool  # whether the tokenizers of `source` are not kept
    corpora: Corpora
    provenance: dict[str, Any]  # of the run

    @property
    def tokenizers(self) -> tokenizer.Tokenizers | None:
        """Those that the run has from its beginning; None: they are to be trained."""
        run = self.continued or (None if self.new_vocabulary else self.source)
        return run and run.tokenizers

    def describe(self, run: Run, step: int) -> list[str]:
        """Returns a line that says at which step a run continues, and what has changed."""
        if self.continued is None or step == 0:
            return []
        changed = differences(self.continued.config, run.config, all_fields=True)
        text = f"continuing run {run.folder} at step {step}"
        return [text + (f"; changed: {'; '.join(changed)}" if changed else "")]


def plan_start(
    config: Config,
    folder: AnyPath,
    *,
    new: bool = False,
    init_from: epath.PathLike | None = None,
    init_parts: Sequence[str] = (),
    new_vocabulary: bool = False,
    card: Card | None = None,
) -> Start:
    """Decides how training starts, in all processes alike. The arguments are those of `train`.

    UserError: they do not fit the run in the folder, the card, the corpora or the run to start
    from, or differ between processes.
    """
    options = [f"--init-parts={part}" for part in init_parts]
    options += ["--new-vocabulary"] if new_vocabulary else []
    if options and init_from is None:
        raise UserError(f"{options[0]}: needs --init-from")
    continued = _existing_run(config, folder, new)
    saved = [] if continued is None else checkpoint.steps(continued.checkpoints)
    source = _source(continued, bool(saved), init_from, options)
    if source is not None:
        origin = f"--init-from={init_from}"
        if not new_vocabulary and source.config.tokenizer != config.tokenizer:
            origin += " without --new-vocabulary"
        free = ["tokenizer"] if new_vocabulary else []
        depths = {"encoder": "layers", "decoder": "decoder_layers"}
        free += [depths[part] for part in depths if init_parts and part not in init_parts]
        require_decided(origin, source.config, config, free)
    corpora = Corpora.of(config.data)
    if card is not None:
        begins = f"card {card.name}: the run starts with"
        require_start(begins, card.provenance.get("init_from"), init_from, options)
        card.require_data(corpora)
    now = _provenance(corpora)
    if source is not None:
        now["init_from"] = _identity(source, options)
    if continued is not None:
        _require_same_data(continued, now)
    facts = now["file_digests"] | {"checkpoints of the run": ", ".join(map(str, saved)) or "none"}
    provenance = continued.provenance if continued else now
    start = Start(continued, source, tuple(init_parts), new_vocabulary, corpora, provenance)
    facts |= tokenizer.digests(config.tokenizer) if start.tokenizers is None else {}
    processes.require_same_everywhere(config, facts)
    return start


def first_state(start: Start, setup: Setup, key: Key) -> tuple[TrainState, Progress, list[str]]:
    """Returns the state and the progress of the newest intact checkpoint, or those of a new run and
    lines that say which parameters are those of `start.source`.

    UserError: no checkpoint is intact, or the parameters of `start.source` do not fit.
    """
    # Another process may have saved since `start` was planned, and before this one had the lock.
    if start.continued is not None and (stored := restored(start.continued, setup)):
        return *stored, []
    state = setup.compile_init()(key)
    if start.source is None:
        return state, Progress(), []
    taken, lines = params_from(start.source, setup, start.parts)
    params = merge(state.params, taken)
    average = None if state.ema is None else jax.tree.map(jnp.copy, restrict(params, state.ema))
    # Its step 0 is not evaluated yet, and may be the best.
    return state._replace(params=params, ema=average), Progress(evaluated=-1), lines


def store_run(start: Start, run: Run, metrics: MetricsFile, step: int, progress: Progress) -> None:
    """Creates the run, or stores its new config, and cuts its metrics at the step from which
    training goes on; waits until all processes see the run. UserError: one does not."""
    if processes.is_coordinator():
        if start.continued is None:
            runs.create(run)
        else:
            runs.update(start.continued, run.config)
        every = (start.continued or run).config.train.log_every
        metrics.cut(step, progress.evaluated, expected=step - step % every)
    processes.wait_for_all("run")
    # Network file systems may show it later.
    end = time.monotonic() + APPEARS_WITHIN
    while not (appears := runs.exists(run.folder)) and time.monotonic() < end:
        time.sleep(0.5)
    if processes.maximum(not appears):
        raise UserError(f"run {run.folder}: must be on storage that all processes share")


def checkpoint_trees(state: TrainState) -> dict[str, Any]:
    """Returns the trees of a checkpoint: the parameters for translation, and all other state."""
    rest = {name: tree for name, tree in state._asdict().items() if name not in ("params", "ema")}
    if state.ema is not None:
        rest["params"] = restrict(state.params, state.ema)
    return {"weights": state.eval_params, "training": rest}


def restored(run: Run, setup: Setup) -> tuple[TrainState, Progress] | None:
    """Returns the state and the progress of the newest intact checkpoint; None: there is none.

    Skips damaged checkpoints with a warning. UserError: all are damaged, or one is of another
    format.
    """
    steps, state = checkpoint.steps(run.checkpoints), setup.abstract_state
    for path in checkpoint.without_manifest(run.checkpoints):
        problem = f"{manifest.describe(path)}: {manifest.NAME} is missing"
        if not steps:
            raise UserError(f"{problem}, and no checkpoint is whole; name a new folder")
        newest = manifest.step_of(path) > steps[-1]
        left = "continuing from the checkpoint before it" if newest else "it is left as it is"
        logger.warning("%s; %s", problem, left)
    for step in reversed(steps):
        try:
            trees = {
                name: checkpoint.restore(run.checkpoints, step, name, like)
                for name, like in checkpoint_trees(state).items()
            }
            progress = Progress(**checkpoint.progress(run.checkpoints, step))
        except UserError as error:
            # A checkpoint of another format is not damaged, and would be replaced.
            if step == steps[0] or isinstance(error, manifest.OtherFormatError):
                raise
            logger.warning("%s; continuing from the checkpoint before it", error)
            continue
        params, rest = trees["weights"], trees["training"]
        if state.ema is not None:
            rest["ema"] = restrict(params, state.ema)
            params = merge(params, rest.pop("params"))
        return state._replace(params=params, **rest), progress
    records, _ = whole_records(run.folder / "metrics.jsonl")
    if last := last_step(records):
        what = f"has no checkpoint, although it was trained to step {last} or further"
        logger.warning("run %s: %s; starting from the beginning", run.folder, what)
    return None


def _existing_run(config: Config, folder: AnyPath, new: bool) -> Run | None:
    """Returns the run in `folder`, with its config as it is stored; None: there is none.

    UserError: it has another config or draws pairs in another order, or `new` is true.
    """
    if not runs.exists(folder):
        return None
    if new:
        raise UserError(f"run {folder}: exists; --new needs a folder that is missing or empty")
    run = replace(runs.load(folder), config=runs.load_config(folder))
    if changed := differences(run.config, config):
        raise UserError(
            f"run {folder}: has another config ({'; '.join(changed)}); "
            "give the same config to continue, or name another folder"
        )
    if (order := run.provenance.get("order")) != VERSION:
        raise UserError(
            f"run {folder}: draws pairs in order {order}, this version in order {VERSION}; name "
            "another folder"
        )
    return run


def _source(
    continued: Run | None, saved: bool, init_from: epath.PathLike | None, options: list[str]
) -> Run | None:
    """Returns the run with whose parameters training starts, or None.

    continued: the run to continue. saved: whether it has checkpoints; the run that it started with
    need not be there any more, or may have been trained further. UserError: it was to start with
    other parameters.
    """
    begun, run, otherwise = None, "", ", or name another folder"
    if continued is not None and (init_from is not None or not saved):
        begun, run = continued.provenance.get("init_from"), f"run {continued.folder}"
        begins = f"{run}: {'' if saved else 'has no checkpoint yet, and '}starts with"
        require_start(begins, begun, init_from, options, otherwise)
    if init_from is None or saved:
        return None
    source = runs.load(init_from)
    source.require_float32()
    now = _identity(source, options)
    if begun is not None and begun.get("params", now["params"]) != now["params"]:
        raise UserError(
            f"--init-from={init_from}: the parameters of its step {now['step']} are not those that "
            f"{run} starts with, of {begun['run']}, step {begun['step']}; give those{otherwise}"
        )
    return source


def _identity(source: Run, options: list[str]) -> dict[str, Any]:
    """Returns what identifies the parameters of a run that another one starts with, and which of
    them it takes."""
    step = source.best_step()
    params = checkpoint.digest(source.checkpoints, step, "weights")
    return {"run": str(source.folder), "step": step, "params": params, "options": options}


def _provenance(corpora: Corpora) -> dict[str, Any]:
    """Returns the provenance of a run: versions of packages and of the order of the pairs, the
    devices, and digests of the corpora."""
    first = jax.devices()[0]
    devices = {"count": jax.device_count(), "platform": first.platform, "kind": first.device_kind}
    digests = {"data_digests": corpora.digests(), "file_digests": corpora.file_digests()}
    return {"versions": runs.versions(), "order": VERSION, "devices": devices, **digests}


def _require_same_data(run: Run, now: dict[str, Any]) -> None:
    """Checks that no corpus has changed since the run began. UserError: one has.

    now: the provenance that a new run would have.
    """
    digests = run.provenance.get("file_digests", {})
    files = [
        f"{path}: SHA-256 {digests[path][:12]}… -> {digest[:12]}…"
        for path, digest in now["file_digests"].items()
        if digests.get(path, digest) != digest
    ]
    for split, corpora in now["data_digests"].items():
        before = run.provenance.get("data_digests", {}).get(split, {})
        for name, digest in corpora.items():
            if before.get(name, digest) != digest:
                which = f" ({'; '.join(files)})" if files else ""
                raise UserError(
                    f"data.{split}={name}: has changed since run {run.folder} began{which}; give "
                    "the same data to continue, or name another folder"
                )
