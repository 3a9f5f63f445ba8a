"""Only one training at a time writes to a run."""

import errno
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, NoReturn

import pytest
from common import Capture, Log, Patch

from transformer_jax.errors import UserError
from transformer_jax.files import AnyPath
from transformer_jax.runs import lock
from transformer_jax.runs.lock import locked

HELD = r"run .*: is in use by a process on \S+ since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC; wait for"


def hold(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the lock of a run until it is killed."""
    code = f"""
import pathlib, time
from transformer_jax.runs.lock import locked
with locked(pathlib.Path("{folder}")):
    print("now", flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    return process


def test_a_second_process_is_told_who_holds_the_run(tmp_path: Path) -> None:
    with hold(tmp_path / "r") as process:
        with pytest.raises(UserError, match=HELD), locked(tmp_path / "r"):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        with locked(tmp_path / "r"):
            assert (tmp_path / "r" / lock.NAME).exists()
    assert not [*(tmp_path / "r").iterdir()]
    with locked(tmp_path / "new" / "r"):
        pass
    assert not (tmp_path / "new").exists()


def test_a_lock_that_its_holder_has_deleted_is_none(tmp_path: Path, monkeypatch: Patch) -> None:
    """Its holder ends between the opening and the locking of the file."""
    flock = lock.fcntl.flock

    def late(file: IO[str], operation: int) -> None:
        monkeypatch.setattr(lock.fcntl, "flock", flock)
        (tmp_path / lock.NAME).unlink()
        flock(file, operation)

    monkeypatch.setattr(lock.fcntl, "flock", late)
    with locked(tmp_path), pytest.raises(UserError, match=HELD), locked(tmp_path):
        pass


@pytest.fixture
def without_locks(place: AnyPath, monkeypatch: Patch) -> AnyPath:
    """A folder on a disk whose system has no locks, or in object storage."""

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    monkeypatch.setattr(lock, "BEAT", 0.1)
    monkeypatch.setattr(lock, "STALE", 1.0)
    return place


def test_without_locks_the_holder_gives_signs_of_life(without_locks: AnyPath, caplog: Log) -> None:
    with locked(without_locks):
        with pytest.raises(UserError, match=HELD), locked(without_locks):
            pass
        assert "waiting up to 1 seconds for a sign of life" in caplog.text
    assert not (without_locks / lock.NAME).exists()
    assert all(thread.name != "lock" for thread in threading.enumerate())


def test_without_locks_a_holder_that_was_suspended_ends(
    without_locks: AnyPath, monkeypatch: Patch, capsys: Capture
) -> None:
    """Another process has taken the lock meanwhile, and keeps it."""
    ended = threading.Event()

    def end(status: int) -> NoReturn:
        assert status == 2
        ended.set()
        raise RuntimeError

    monkeypatch.setattr(lock, "end_now", end)
    other = b"a process on another machine since today\n7"
    with locked(without_locks):
        (without_locks / lock.NAME).write_bytes(other)
        assert ended.wait(10)
    assert (without_locks / lock.NAME).read_bytes() == other
    for line in capsys.readouterr().err.splitlines():
        assert "is in use by a process on another machine since today; wait for" in line
        assert line.endswith("this process has lost the run")


def test_without_locks_a_dead_holder_is_noticed(without_locks: AnyPath) -> None:
    (without_locks / lock.NAME).write_bytes(b"a process on another machine since yesterday\n7")
    with locked(without_locks):
        assert b"yesterday" not in (without_locks / lock.NAME).read_bytes()
