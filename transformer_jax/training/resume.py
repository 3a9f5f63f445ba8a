"""Continues a run, or starts one with the parameters of another."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from transformer_jax.config import Config, differences
from transformer_jax.errors import UserError
from transformer_jax.files import AnyPath
from transformer_jax.models.make import abstract_params
from transformer_jax.parallel.parameters import shard_tree
from transformer_jax.runs import checkpoint, manifest, run
from transformer_jax.runs.run import Run
from transformer_jax.text.corpus import Corpora
from transformer_jax.training.reporters import whole_records
from transformer_jax.training.setup import Setup
from transformer_jax.training.step import TrainState

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """What a checkpoint stores besides the `TrainState`, to continue the run."""

    position: int = 0  # of the next batch in the data
    seconds: float = 0.0  # of training in all processes of the run
    best: float | None = None  # best development score so far; higher is better
    evaluations_since_best: int = 0
    evaluated: int = 0  # step of the last evaluation
    sums: dict[str, Any] = field(default_factory=dict)  # of the meter, since the last record


def existing_run(config: Config, folder: AnyPath, new: bool) -> Run | None:
    """Returns the run in `folder`, which is to be continued, with its config as it is stored; None:
    there is none.

    UserError: it has another config, or `new` is true.
    """
    if not run.exists(folder):
        return None
    if new:
        raise UserError(f"run {folder}: exists; --new needs a folder that is missing or empty")
    old = replace(run.load(folder), config=run.load_config(folder))
    if changed := differences(old.config, config):
        raise UserError(
            f"run {folder}: has another config ({'; '.join(changed)}); "
            "give the same config to continue, or name another folder"
        )
    return old


def provenance(corpora: Corpora, source: Run | None, order: int) -> dict[str, Any]:
    """Returns the provenance of a run: versions of packages and of the order of the pairs, the
    devices, digests of the corpora, and the run whose parameters it starts with."""
    here = {"versions": run.versions(), "order": order, "devices": _devices()}
    digests = {"data_digests": corpora.digests(), "file_digests": corpora.file_digests()}
    begins = {} if source is None else {"init_from": _start(source)}
    return here | digests | begins


def _devices() -> dict[str, Any]:
    """Returns the number of devices of all processes, and their platform and kind."""
    first = jax.devices()[0]
    return {"count": jax.device_count(), "platform": first.platform, "kind": first.device_kind}


def source_of_params(old: Run | None, init_from: epath.PathLike | None) -> Run | None:
    """Returns the run whose parameters training starts with, or None.

    old: the run to continue, without checkpoints. UserError: it was to start with other parameters.
    """
    begun = None if old is None else old.provenance.get("init_from")
    if begun is not None and init_from is None:
        raise UserError(
            f"run {old and old.folder}: has no checkpoint yet, and starts with the parameters of "
            f"another run; give --init-from={begun['run']} again"
        )
    if init_from is None:
        return None
    if old is not None and begun is None:
        raise UserError(
            f"--init-from={init_from}: run {old.folder} has begun without it; leave it out, or "
            "name another folder"
        )
    source = run.load(init_from)
    source.require_float32()
    now = _start(source)
    if begun is not None and begun.get("params", now["params"]) != now["params"]:
        raise UserError(
            f"--init-from={init_from}: the parameters of its step {now['step']} are not those that "
            f"run {old and old.folder} starts with, of {begun['run']}, step {begun['step']}; give "
            "those, or name another folder"
        )
    return source


def _start(source: Run) -> dict[str, Any]:
    """Returns what identifies the parameters of a run that another one starts with."""
    step = source.best_step()
    params = checkpoint.digest(source.checkpoints, step, "weights")
    return {"run": str(source.folder), "step": step, "params": params}


def require_same_data(old: Run, found: dict[str, Any]) -> None:
    """Checks that no corpus has changed since the run began. UserError: one has.

    found: the provenance of the corpora as they are now.
    """
    known = old.provenance.get("file_digests", {})
    files = [
        f"{path}: SHA-256 {known[path][:12]}… -> {digest[:12]}…"
        for path, digest in found["file_digests"].items()
        if known.get(path, digest) != digest
    ]
    for split, digests in found["data_digests"].items():
        before = old.provenance.get("data_digests", {}).get(split, {})
        for name, digest in digests.items():
            if before.get(name, digest) != digest:
                which = f" ({'; '.join(files)})" if files else ""
                raise UserError(
                    f"data.{split}={name}: has changed since run {old.folder} began{which}; give "
                    "the same data to continue, or name another folder"
                )


def with_params_of(source: Run, state: TrainState, setup: Setup) -> TrainState:
    """Returns the state with the parameters of another run.

    UserError: they do not fit; the message names every mismatch.
    """
    model = setup.model
    like = abstract_params(model.config, model.source_vocabulary, model.target_vocabulary)
    try:
        stored = source.params(like=like)
    except UserError as error:
        raise UserError(f"--init-from {source.folder}: {error}") from error
    params = shard_tree(stored, setup.mesh)
    average = None if state.ema is None else jax.tree.map(jnp.copy, params)
    return state._replace(params=params, ema=average)


def checkpoint_trees(state: TrainState) -> dict[str, Any]:
    """Returns the trees of a checkpoint: the parameters for translation, and all other state."""
    rest = state._asdict()
    params = rest.pop("params" if state.ema is None else "ema")
    return {"weights": params, "training": {k: v for k, v in rest.items() if v is not None}}


def restored(old: Run, setup: Setup) -> tuple[TrainState, Progress] | None:
    """Returns the state and the progress of the newest intact checkpoint; None: there is none.

    Skips damaged checkpoints with a warning. UserError: all are damaged, or one is of another
    format.
    """
    steps, state = checkpoint.steps(old.checkpoints), setup.abstract_state
    for path in checkpoint.without_manifest(old.checkpoints):
        problem = f"{manifest.describe(path)}: {manifest.NAME} is missing"
        if not steps:
            raise UserError(f"{problem}, and no checkpoint is whole; name a new folder")
        newest = manifest.step_of(path) > steps[-1]
        left = "continuing from the checkpoint before it" if newest else "it is left as it is"
        logger.warning("%s; %s", problem, left)
    for step in reversed(steps):
        try:
            trees = {
                name: checkpoint.restore(old.checkpoints, step, name, like)
                for name, like in checkpoint_trees(state).items()
            }
            known = Progress(**checkpoint.progress(old.checkpoints, step))
        except manifest.OtherFormatError:  # which is not damaged, and would be replaced
            raise
        except UserError as error:
            if step == steps[0]:
                raise
            logger.warning("%s; continuing from the checkpoint before it", error)
            continue
        params = {"params" if state.ema is None else "ema": trees["weights"]}
        return state._replace(**trees["training"], **params), known
    records, _ = whole_records(old.folder / "metrics.jsonl")
    if last := max((record["step"] for record in records), default=0):
        logger.warning(
            "run %s: has no checkpoint, although it was trained to step %d or further; starting "
            "from the beginning",
            old.folder,
            last,
        )
    return None
