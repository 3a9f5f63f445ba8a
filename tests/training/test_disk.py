"""A full disk, a folder that cannot be written, and a run that another process still writes to."""

import re
import resource
import time
from pathlib import Path

import pytest
from common import changed, error_line, wait_for
from training_process import reference

from tools.common import config_file
from tools.damage import contents
from tools.faults import Case
from tools.processes import Fault, finish
from transformer_jax.config import Config
from transformer_jax.runs import lock
from transformer_jax.runs.run import Run
from transformer_jax.training.trainer import train

NEW = r"os\.mkdir .*/00000008\.new"
FULL = r"\[Errno 27\] File too large: 'RUN/{}'"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message", "saved"),
    [
        (Fault(NEW, limit=2_000), "saving checkpoint 8 in RUN/checkpoints: File too large", [4, 6]),
        (Fault(NEW, read_only="checkpoints"), ".*Permission denied: 'RUN/checkpoints/.*'", [4, 6]),
        (Fault(r"open .*/metrics\.jsonl'", limit=10), FULL.format("metrics.jsonl"), []),
        (Fault(r"open .*/tensorboard/", limit=400), FULL.format("tensorboard"), []),
        (Fault(r"open .*/\.config\.json", limit=1_000), FULL.format("config.json"), []),
    ],
    ids=["checkpoint", "read-only", "metrics", "tensorboard", "config"],
)
def test_a_full_disk_is_one_line_and_the_run_goes_on(
    fault: Fault, message: str, saved: list[int], tiny_config: Config, finished: Run, tmp_path: Path
) -> None:
    options = ["--tensorboard"] if "tensorboard" in message else []
    whole = reference(tiny_config, finished, tmp_path, *options)
    row = whole.interrupt(Case({}, [fault], 2, f"transformer-jax: error: {message}"))
    assert row["mismatches"] == (["scalars"] if options else [])  # `finished` has drawn none
    assert row["saved"] == saved


def test_a_full_disk_while_a_run_is_continued_changes_nothing(copied: Run, tmp_path: Path) -> None:
    before = contents(tmp_path)
    longer = changed(copied.config, train={"steps": 14})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            train(longer, copied.folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(tmp_path) == before


def test_a_folder_that_cannot_be_written_is_named(
    tiny_config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file is in its place: permissions would not stop root."""
    config = config_file(tiny_config, tmp_path / "config.py")
    (tmp_path / "file").write_text("")
    before = contents(tmp_path)
    for folder in (tmp_path / "file", tmp_path / "file" / "r"):
        error = error_line(["train", f"--config={config}", f"--run={folder}"], capsys)
        assert str(tmp_path / "file") in error
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_a_job_started_again_changes_nothing_while_the_first_one_saves(
    tiny_config: Config, finished: Run, tmp_path: Path
) -> None:
    whole = reference(tiny_config, finished, tmp_path)
    folder = whole.fresh()
    held = folder.with_name("held")
    first = whole.start(folder, Fault(r"open .*/\.manifest\.json", hold=str(held)))
    wait_for(held, first)  # it saves
    before = contents(folder)
    second = whole.train(folder)
    assert second["status"] == 2
    assert re.search("is in use by a process on .*; wait for", second["message"])
    after = contents(folder)  # the first one may have logged more steps
    assert [name for name in before if not after[name].startswith(before[name])] == []
    held.unlink()
    wait_for(folder / "checkpoints/00000004", first)
    first.kill()
    finish(first)
    began = time.monotonic()
    with lock.locked(folder):
        assert time.monotonic() - began < 1
    assert whole.mismatches(folder) == []
