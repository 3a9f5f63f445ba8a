"""Entries of the cache: checked when they are opened, swept, bounded and shared."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import Patch

from transformer_jax.data import entry
from transformer_jax.data.ragged import Ragged

NAMES = ["0" * 64, "1" * 64, "2" * 64]


def write(path: Path, rows: int = 100) -> None:
    """An entry of 8 ids a row on each side."""

    def fill(append: Any) -> Any:
        for start in range(0, rows, 1000):
            ids = [[row] * 8 for row in range(start, min(start + 1000, rows))]
            append(Ragged.of(ids), Ragged.of(ids))
        return {"rows": rows}

    entry.write(path, fill)


def opened(path: Path) -> entry.Entry:
    found = entry.read(path)
    assert found is not None
    return found


def age(path: Path, seconds: float) -> None:
    """Dates a file back."""
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_rows_and_lengths_come_back(tmp_path: Path) -> None:
    write(tmp_path / NAMES[0], 30_000)
    found = opened(tmp_path / NAMES[0])
    assert found.counts == {"rows": 30_000}
    assert found.lengths.counts.tolist() == [0] * 8 + [30_000]
    assert found.target.take(np.array([29_999, 4])).ids.tolist() == [29_999] * 8 + [4] * 8


FILES = ["source.ids", "source.offsets", "target.ids", "target.offsets"]


@pytest.mark.parametrize("file", FILES)
def test_a_changed_file_is_found_by_its_digest(tmp_path: Path, file: str) -> None:
    write(tmp_path / NAMES[0], 30_000)
    path = tmp_path / NAMES[0] / file
    *raw, byte = path.read_bytes()
    path.write_bytes(bytes([*raw, byte ^ 4]))
    assert entry.read(tmp_path / NAMES[0]) is None


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("change", [-8, 8])
def test_a_large_file_that_is_cut_or_too_long_is_found_without_reading_it(
    tmp_path: Path, file: str, change: int, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(entry, "HASHED_BYTES", 0)
    path = tmp_path / NAMES[0]
    write(path)

    def unexpected(*_: object) -> None:
        raise AssertionError("the file is hashed")

    monkeypatch.setattr(entry.hashlib, "blake2b", unexpected)
    assert opened(path).source.row(99).tolist() == [99] * 8
    os.truncate(path / file, (path / file).stat().st_size + change)
    assert entry.read(path) is None


KILLED = """
import sys, pathlib, os, signal
from transformer_jax.data import entry
def fill(append): os.kill(os.getpid(), signal.SIGKILL)
entry.write(pathlib.Path(sys.argv[1]), fill)
"""


def test_what_a_killed_process_has_left_is_swept(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / NAMES[0])])
    old = tmp_path / ".x.json.0123.tmp"
    old.write_text("")
    age(old, 4000)
    (left,) = tmp_path.glob("0*")
    with entry._temporary(tmp_path / NAMES[2]) as (writing, _):
        (tmp_path / f"{NAMES[1]}.ab").mkdir()  # a process that has not locked it yet
        write(tmp_path / NAMES[0])
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {NAMES[0], f"{NAMES[1]}.ab", writing.name}
        assert left.name not in names


def test_entries_that_are_not_used_make_room(tmp_path: Path, monkeypatch: Patch) -> None:
    for seconds, name in ((300, NAMES[0]), (200, NAMES[1])):
        write(tmp_path / name)
        for path in (tmp_path / name, *(tmp_path / name).iterdir()):
            age(path, seconds)
    size = sum(file.stat().st_size for file in (tmp_path / NAMES[0]).iterdir())
    monkeypatch.setattr(entry, "MAX_BYTES", int(2.5 * size))
    used = opened(tmp_path / NAMES[0])  # now the one that was used last, and locked
    write(tmp_path / NAMES[2])
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAMES[0], NAMES[2]]
    monkeypatch.setattr(entry, "MAX_BYTES", 0)
    write(tmp_path / NAMES[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES[:2]  # in use, and new
    assert used.source.row(99).tolist() == [99] * 8
    del used
    write(tmp_path / NAMES[2])
    assert [path.name for path in tmp_path.iterdir()] == [NAMES[2]]


@pytest.mark.parametrize(("folder", "modes"), [(0o1777, "755 644"), (0o700, "700 600")])
def test_entries_are_as_readable_as_the_cache(tmp_path: Path, folder: int, modes: str) -> None:
    tmp_path.chmod(folder)
    old = os.umask(0o077)
    try:
        write(tmp_path / NAMES[0])
    finally:
        os.umask(old)
    path = tmp_path / NAMES[0]
    assert f"{path.stat().st_mode & 0o777:o}" == modes.split()[0]
    assert {f"{file.stat().st_mode & 0o777:o}" for file in path.iterdir()} == {modes.split()[1]}


AS_ANOTHER_USER = """
import mmap, os, sys, pathlib
from transformer_jax.data import entry
b"x".decode("utf-8-sig")  # import what this Python may hide from other users
os.setgid(65534); os.setuid(65534)
found = entry.read(pathlib.Path(sys.argv[1]))
print(found.source.row(7).tolist())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_may_read_an_entry(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o5 != 0o5:
            if folder.is_relative_to(tmp_path.parents[1]):
                folder.chmod(0o755)
            else:
                pytest.skip(f"{folder} is private")
    write(tmp_path / NAMES[0])
    command = [sys.executable, "-c", AS_ANOTHER_USER, str(tmp_path / NAMES[0])]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.stdout == f"{[7] * 8}\n", ended.stderr
