"""Runs that are killed go on as if they had not been, and the comparison notices what differs."""

import random
import shutil
from pathlib import Path

import pytest
from training_process import reference, two_processes

from tools.faults import OPERATIONS, SECONDS, Case, kill_case, outcome
from tools.processes import Fault
from transformer_jax.config import Config
from transformer_jax.runs import manifest
from transformer_jax.runs.run import Run


@pytest.mark.slow
@pytest.mark.parametrize("phase", SECONDS)
def test_a_run_killed_in_a_phase_ends_as_if_it_were_not(
    phase: str, tiny_config: Config, finished: Run, tmp_path: Path
) -> None:
    case = kill_case(phase, random.Random(0))
    assert reference(tiny_config, finished, tmp_path).interrupt(case)["mismatches"] == []


@pytest.mark.slow
def test_a_run_killed_before_operations_on_files_ends_as_if_it_were_not(
    tiny_config: Config, finished: Run, tmp_path: Path
) -> None:
    case = Case({}, [Fault(name, signals=(9,)) for name in OPERATIONS[3:6]], 137)
    row = reference(tiny_config, finished, tmp_path).interrupt(case)
    assert row["mismatches"] == []


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed_end_as_if_it_were_not(
    tiny_config: Config, tmp_path: Path
) -> None:
    whole = two_processes(tiny_config, tmp_path)
    assert whole.train(whole.run)["status"] == 0
    case = kill_case("saving", random.Random(0), 1)
    assert whole.interrupt(case)["mismatches"] == []


def test_differences_are_noticed(finished: Run, tmp_path: Path) -> None:
    wanted, run = outcome(Path(finished.folder)), tmp_path / "run"
    shutil.copytree(finished.folder, run)

    def differences() -> list[str]:
        return [name for name, value in outcome(run).items() if value != wanted[name]]

    assert differences() == []
    metrics = run / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    for changed in ([*lines, lines[-1]], lines[:-2]):
        metrics.write_bytes(b"".join(changed))
        assert differences() == ["metrics"]
    metrics.write_bytes(b"".join(lines))
    newest = run / "checkpoints" / "00000012"
    best = manifest.read(newest).best
    shutil.rmtree(newest)
    shutil.copytree(run / "checkpoints" / "00000008", newest)
    (newest / manifest.NAME).unlink()
    manifest.write(newest, 12, best)
    assert differences() == ["arrays", "progress"]
