"""A full disk, a folder that cannot be written, and a run that another process still writes to."""

import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from common import error_line
from training_process import WHILE_SAVING, assert_same, begin, wait_for

from tools.common import config_file
from transformer_jax.config import Config
from transformer_jax.errors import UserError
from transformer_jax.runs import checkpoint, run
from transformer_jax.training.trainer import train

FULL = """
import resource, time
from transformer_jax.runs import checkpoint
def before(owner, name, when, size):
    function = getattr(owner, name)
    def limited(*arguments, **options):
        if when(*arguments):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        return function(*arguments, **options)
    setattr(owner, name, limited)
def at_8(run, record):
    while record["step"] == 8 and 6 not in checkpoint.steps(run / "checkpoints"):
        time.sleep(0.05)  # until no checkpoint is being written
    return record["step"] == 8
"""
"""Defines `before`: once `when` is true, no file may become larger than `size` bytes."""

CHECKPOINT = """
from transformer_jax.runs import checkpoint
saves = []
before(checkpoint, "_require_space", lambda *_: saves.append(1) or len(saves) == 3, 2_000)
"""
METRICS = """
from transformer_jax.training.reporters import MetricsFile
before(MetricsFile, "__call__", lambda file, record: at_8(file._path.parent, record), 900)
"""
BOARD = """
from transformer_jax.training.reporters import TensorBoard
before(TensorBoard, "__call__", lambda board, record: at_8(board._folder.parent, record), 400)
"""
CONFIG = """
from transformer_jax.runs import run
before(run, "create", lambda *_: True, 1_000)
"""


def files(folder: Path) -> dict[str, bytes]:
    """The contents of all files, by name."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "options", "message", "steps"),
    [
        (CHECKPOINT, [], "saving checkpoint 8 in {run}/checkpoints: File too large", [4, 6]),
        (METRICS, [], "[Errno 27] File too large: '{run}/metrics.jsonl'", [4, 6]),
        (BOARD, ["--tensorboard"], "[Errno 27] File too large: '{run}/tensorboard'", [4, 6]),
        (CONFIG, [], "[Errno 27] File too large: '{run}'", []),
    ],
    ids=["checkpoint", "metrics", "tensorboard", "config"],
)
def test_a_full_disk_is_one_line_and_the_run_goes_on(
    program: str,
    options: list[str],
    message: str,
    steps: list[int],
    tiny_config: Config,
    finished: run.Run,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "r"
    process, _ = begin(tiny_config, folder, *options, program=FULL + program)
    _, error = process.communicate(timeout=250)
    assert process.returncode == 2
    assert "Traceback" not in error
    errors = [line for line in error.splitlines() if "error" in line or "Error" in line]
    wanted = f"transformer-jax: error: {message.format(run=folder)}"
    assert len(errors) == 1, error
    assert error.splitlines()[-1].startswith(wanted)
    assert checkpoint.steps(folder / "checkpoints") == steps
    assert folder.exists() == bool(steps)
    assert_same(train(tiny_config, folder), finished)


def test_a_full_disk_while_a_run_is_continued_changes_nothing(
    tiny_config: Config, finished: run.Run, tmp_path: Path
) -> None:
    shutil.copytree(finished.folder, tmp_path / "r")
    before = files(tmp_path)
    longer = replace(tiny_config, train=replace(tiny_config.train, steps=14))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            train(longer, tmp_path / "r")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(tmp_path) == before


def test_a_folder_that_cannot_be_written_is_named(
    tiny_config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file is in its place: permissions would not stop root."""
    config = config_file(tiny_config, tmp_path / "config.py")
    (tmp_path / "file").write_text("")
    before = files(tmp_path)
    for folder in (tmp_path / "file", tmp_path / "file" / "r"):
        error = error_line(["train", f"--config={config}", f"--run={folder}"], capsys)
        assert str(tmp_path / "file") in error
    assert files(tmp_path) == before


@pytest.mark.long
def test_a_job_started_again_deletes_nothing_while_the_first_one_saves(
    tiny_config: Config, tmp_path: Path
) -> None:
    folder = tmp_path / "r"
    endless = replace(tiny_config, train=replace(tiny_config.train, steps=100_000))
    process, saving = begin(endless, folder, program=WHILE_SAVING)
    wait_for(saving, process)
    process.send_signal(signal.SIGTERM)
    before = files(folder)
    assert any("00000008.new1" in name for name in before)
    with pytest.raises(UserError, match=r"is in use by a process on .*; wait for"):
        train(tiny_config, folder)
    assert process.poll() is None
    after = files(folder)  # the first one may log the step that it finishes
    assert all(after[name].startswith(content) for name, content in before.items())
    saving.unlink()
    process.communicate(timeout=250)
    assert process.returncode == 143
    last = checkpoint.steps(folder / "checkpoints")[-1]
    assert last >= 8
    longer = replace(tiny_config, train=replace(tiny_config.train, steps=last + 2))
    assert checkpoint.steps(train(longer, folder).checkpoints)[-1] == last + 2
