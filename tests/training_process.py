"""Comparisons of runs that were stopped with one that was not."""

from pathlib import Path
from typing import Any

import jax
from common import on_devices

from tools.common import config_file
from tools.damage import array_digests
from tools.faults import TIMED, Reference
from transformer_jax.config import Config
from transformer_jax.runs import checkpoint, run
from transformer_jax.training.reporters import Record, read_metrics


def reference(config: Config, whole: run.Run, folder: Path, *options: str) -> Reference:
    """What runs in `folder` are compared with, in processes of their own."""
    jax_config: Any = jax.config  # which declares its fields at run time
    programs = {"JAX_COMPILATION_CACHE_DIR": jax_config.jax_compilation_cache_dir}
    path = config_file(config, folder / "config.py")
    return Reference(Path(whole.folder), path, options, programs)


def two_processes(config: Config, folder: Path) -> Reference:
    """A run of two processes of two devices, not trained yet, and how others like it are."""
    path = config_file(config, folder / "config.py")
    return Reference(folder / "whole", path, ("--processes=2",), on_devices(2))


def assert_same(made: run.Run, whole: run.Run) -> None:
    """Both have trained to the same bits, and have the same metrics but for times."""
    assert arrays(made) == arrays(whole)
    assert records(made) == records(whole)


def arrays(made: run.Run) -> dict[str, str]:
    """The digests of all arrays of the last checkpoint."""
    return array_digests(made.checkpoints, checkpoint.steps(made.checkpoints)[-1])


def of_kind(made: run.Run, kind: str) -> list[Record]:
    """The records of a run of one kind."""
    return [each for each in read_metrics(made.folder / "metrics.jsonl") if each["kind"] == kind]


def records(made: run.Run) -> list[dict[str, Any]]:
    """The metrics of a run without those that depend on time or on when it is to end."""
    rows = read_metrics(made.folder / "metrics.jsonl")
    return [{k: v for k, v in each.items() if k not in (*TIMED, "done")} for each in rows]
