"""The campaign of faults kills where it says, and notices what it looks for."""

import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import pytest

from tools import faults, faults_child
from tools.common import config_file
from tools.faults import Reference, Setting
from transformer_jax.config import Config
from transformer_jax.runs import checkpoint, manifest
from transformer_jax.runs.run import Run
from transformer_jax.training.reporters import MetricsFile, TensorBoard, read_metrics
from transformer_jax.training.trainer import train


def setting(folder: Path, config: Config, **options: Any) -> Setting:
    """How runs are trained as by tests, with the programs that these have compiled."""
    programs = folder / "user_cache" / "transformer_jax" / "programs"
    programs.parent.mkdir(parents=True)
    config_of_jax: Any = jax.config  # which declares its fields at run time
    programs.symlink_to(config_of_jax.jax_compilation_cache_dir)
    flags = {"XLA_FLAGS": os.environ["XLA_FLAGS"], "XDG_CACHE_HOME": str(folder / "user_cache")}
    used = faults.environment(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.1", **flags)
    return Setting(folder, config_file(config, folder / "config.py"), environment=used, **options)


@pytest.mark.long
def test_a_run_killed_while_it_publishes_a_checkpoint_ends_as_if_it_were_not(
    tiny_config: Config, finished: Run, tmp_path: Path
) -> None:
    """By SIGKILL, before the first checkpoint gets its name."""
    used, run = setting(tmp_path, tiny_config, options=()), tmp_path / "run"
    operation = "rename checkpoints/N.newN"
    job = used.start(run, {"kill_at": [operation, 1]})
    status, _ = job.wait()
    assert status == 137
    assert [e.get("operation") for e in job.events()].count(operation) == 1
    assert faults.phase_of(faults.active(job.events())) in ("saving", "evaluating", "compiling")
    assert checkpoint.steps(run / "checkpoints") == [4]  # whole, though without its name
    train(tiny_config, run)
    assert faults.differences(faults.outcome(run), faults.outcome(Path(finished.folder))) == []


@pytest.mark.long
@pytest.mark.parametrize(("processes", "phase"), [(1, "evaluating"), (2, "training")])
def test_a_run_that_a_signal_stops_is_compared(
    tiny_config: Config, tmp_path: Path, processes: int, phase: str
) -> None:
    reference = Reference(setting(tmp_path, tiny_config, processes=processes))
    found = faults.signal_in(reference, signal.SIGTERM, phase, random.Random(0))
    assert found["mismatches"] == []
    assert found["status"] == 143
    assert phase != "training" or found["saved"]


def test_differences_are_noticed(finished: Run, tmp_path: Path) -> None:
    wanted = faults.outcome(Path(finished.folder))
    run = tmp_path / "run"
    shutil.copytree(finished.folder, run)
    assert faults.differences(faults.outcome(run), wanted) == []
    metrics = run / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join([*lines, lines[-1]]))
    assert faults.differences(faults.outcome(run), wanted) == ["metrics"]
    metrics.write_bytes(b"".join(lines[:-2]))
    assert faults.differences(faults.outcome(run), wanted) == ["metrics"]
    metrics.write_bytes(b"".join(lines))
    newest = run / "checkpoints" / "00000012"
    best = manifest.read(newest).best
    shutil.rmtree(newest)
    shutil.copytree(run / "checkpoints" / "00000008", newest)
    (newest / manifest.NAME).unlink()
    manifest.write(newest, 12, best)
    found = faults.differences(faults.outcome(run), wanted)
    assert found == ["weights", "training", "progress"]


def test_scalars_are_those_that_tensorboard_shows(tmp_path: Path) -> None:
    """A run is killed after step 8. It continues at step 4, whose evaluation it repeats."""
    folder = tmp_path / "tensorboard"

    def write(first: int, evaluated: int, steps: range, name: str) -> None:
        metrics = MetricsFile(tmp_path / "metrics.jsonl")
        metrics.cut(first, evaluated)
        with TensorBoard(folder) as board:

            def report(kind: str, step: int, **values: Any) -> None:
                for reporter in (metrics, board):
                    reporter({"kind": kind, "step": step, **values})

            report("message", first, text="")
            for step in steps:
                if step > first:
                    report("train", step, loss=step / 2, minutes=0.5)
                if step == 4:
                    report("evaluation", step, sets={"dev": {"bleu": 1.5}})
        next(folder.glob("*.out.*")).rename(folder / name)  # otherwise named by the second

    write(0, 0, range(2, 9, 2), "events.1")
    write(4, 0, range(4, 13, 2), "events.2")
    wanted = [(step, "loss", step / 2) for step in range(2, 13, 2)]
    assert faults.scalars(folder) == sorted([*wanted, (4, "dev/bleu", 1.5)])
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 7


def test_broken_promises_are_named() -> None:
    case = {"signal": "SIGTERM", "phase": "saving", "status": 143, "message": "step 4: stopped by"}
    signals = [
        case,
        case | {"status": 0},
        case | {"phase": "training", "saved": []},
        case | {"phase": "saving, twice"},
    ]
    skipped = {"kind": "loss NaN", "skipped": [3], "said": [3], "counted": 1, "changed": []}
    skipped |= {"all": {"status": 2}}
    found = {
        "mismatches": 0,
        "runs_compared": 9,
        "silent_loads": 0,
        "signals": signals[:1],
        "nan_steps": [skipped],
        "disk_faults": [{"fault": "full", "status": 2, "mismatches": []}],
        "locks": {
            "second": {"status": 2, "holder_goes_on": True},
            "without_flock": {"taken": True},
        },
    }
    assert list(faults.failures(found)) == []
    broken = found | {
        "mismatches": 1,
        "silent_loads": 2,
        "signals": signals,
        "nan_steps": [skipped | {"changed": [".params"]}],
        "disk_faults": [{"fault": "full", "status": 1}],
        "locks": found["locks"] | {"without_flock": {"taken": False}},
    }
    assert len(list(faults.failures(broken))) == 8


def test_phases_are_those_that_have_not_ended() -> None:
    begun = [{"phase": name, "begin": True, "process": 0} for name in ("training", "evaluating")]
    ended = [{"phase": "evaluating", "begin": False, "process": 0}]
    other = [{"phase": "saving", "begin": True, "process": 1}]
    assert faults.phase_of(faults.active([])) == "starting"
    assert faults.phase_of(faults.active(begun + other)) == "evaluating"
    assert faults.phase_of(faults.active(begun + ended + other)) == "training"
    assert faults.active(other, 1) == ["saving"]


@pytest.mark.parametrize(
    ("event", "arguments", "name"),
    [
        ("open", ("/r/config.json", None, os.O_RDONLY), None),
        ("open", ("/r/metrics.jsonl", None, os.O_WRONLY | os.O_APPEND), "open metrics.jsonl"),
        ("open", ("/elsewhere", None, os.O_WRONLY), None),
        ("os.rename", ("/r/checkpoints/00000012.new1", "x", -1, -1), "rename checkpoints/N.newN"),
        ("os.remove", ("manifest.json", 7), "remove manifest.json"),
        ("os.remove", ("manifest.json", -1), None),
        ("os.mkdir", (b"/r/checkpoints", 0o777, -1), "mkdir checkpoints"),
    ],
)
def test_operations_have_names(event: str, arguments: tuple[Any, ...], name: str | None) -> None:
    assert faults_child.operation_name(event, arguments, "/r") == name
