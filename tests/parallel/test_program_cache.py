"""Compiled programs are kept where only their user can change them, whole, and up to a limit."""

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from common import Log, Patch
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from transformer_jax.errors import UserError
from transformer_jax.parallel import program_cache
from transformer_jax.parallel.program_cache import VARIABLE, cache_programs, program_folder

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: Patch) -> Iterator[Path]:
    """The folder of a user who has no cache yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield tmp_path / "transformer_jax" / "programs"
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def compiled() -> float:
    """Compiles the same program, or reads it from the cache, in a process that starts."""
    reset_cache()
    cache_programs()
    return float(jax.jit(lambda x: jnp.sin(x) * 3)(0.5))


def entry(folder: Path) -> Path:
    """The file of the program, which is not the only one that JAX has compiled."""
    (path,) = folder.glob("jit__lambda*-cache")
    return path


@pytest.mark.parametrize("mode", [None, 0o755, 0o775, 0o1777])
def test_the_users_folder_is_or_becomes_private(programs: Path, mode: int | None) -> None:
    if mode is not None:
        programs.mkdir(parents=True)
        programs.chmod(mode)
    cache_programs()
    assert programs.stat().st_mode & 0o7777 == 0o700
    assert program_folder() == programs


def test_the_folder_of_another_user_is_refused(programs: Path, monkeypatch: Patch) -> None:
    programs.mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: programs.stat().st_uid + 1)
    with pytest.raises(UserError, match=f"^{programs}: belongs to user .* {VARIABLE}$"):
        cache_programs()


@pytest.mark.parametrize("shared", [False, True])
def test_a_folder_that_all_may_write_is_refused(
    programs: Path, tmp_path: Path, monkeypatch: Patch, shared: bool
) -> None:
    folder = tmp_path / "shared" if shared else programs
    if shared:
        monkeypatch.setenv(VARIABLE, str(folder))
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(UserError, match=f"^{folder}: has mode 0777, .* run chmod 0700 on it, or"):
        cache_programs()
    assert folder.stat().st_mode & 0o7777 == 0o777


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o1777])
def test_the_variable_decides(
    programs: Path, tmp_path: Path, monkeypatch: Patch, mode: int
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv(VARIABLE, str(folder))
    jax.config.update("jax_compilation_cache_dir", str(folder))  # as JAX does when it is imported
    cache_programs()
    assert getattr(jax.config, OPTIONS[0]) == str(folder)
    assert folder.stat().st_mode & 0o7777 == mode
    assert not programs.exists()


@pytest.mark.parametrize("name", [os.fsdecode(b"caf\xe9"), "file"])
def test_training_does_without_a_folder_that_cannot_be_named_or_made(
    name: str, tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
    assert compiled() > 1
    (said,) = caplog.messages
    assert said.startswith("compiled programs are not kept: ")
    assert said.endswith(f"; name another folder in {VARIABLE}")
    assert program_folder() is None
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("damage", ["cut", "emptied", "flipped"])
def test_a_damaged_file_is_replaced(programs: Path, caplog: Log, damage: str) -> None:
    wanted = compiled()
    cache_programs()
    content = entry(programs).read_bytes()
    cut, (byte, *rest) = content[: len(content) // 2], content[len(content) // 2 :]
    damaged = {"cut": cut, "emptied": b"", "flipped": cut + bytes([byte ^ 16, *rest])}
    entry(programs).write_bytes(damaged[damage])
    assert caplog.messages == []
    assert compiled() == wanted
    (said,) = caplog.messages
    assert said.startswith(f"{programs}: 1 damaged files are deleted ({entry(programs).name}), ")
    assert len(entry(programs).read_bytes()) > len(content) // 2  # its time of compilation differs
    caplog.clear()
    assert compiled() == wanted
    assert caplog.messages == []


def test_only_files_that_have_changed_are_read(programs: Path, monkeypatch: Patch) -> None:
    compiled()
    cache_programs()
    for path in programs.glob("*-cache"):
        os.utime(path, (2000, 2000))
    read: list[bytes] = []
    monkeypatch.setattr(program_cache, "_is_whole", lambda content: not read.append(content))
    cache_programs()
    assert read == []
    os.utime(entry(programs))
    cache_programs()
    assert read == [entry(programs).read_bytes()]


def test_the_oldest_files_are_deleted(programs: Path, monkeypatch: Patch) -> None:
    compiled()
    for path in programs.glob("*-cache"):
        os.utime(path, (2000, 2000))
    other = programs / f"decode-old{program_cache.SEARCH}"
    other.write_bytes(entry(programs).read_bytes())
    os.utime(other, (1000, 1000))
    size = sum(path.stat().st_size for path in [*programs.glob("*-cache"), other])
    monkeypatch.setattr(program_cache, "LIMIT", size)
    cache_programs()
    assert other.exists()
    monkeypatch.setattr(program_cache, "LIMIT", size - 1)
    cache_programs()
    assert not other.exists()
    assert entry(programs).exists()


def test_a_shared_folder_is_not_reduced(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "jit_others-cache").write_bytes(b"1234")
    monkeypatch.setattr(program_cache, "LIMIT", 3)
    cache_programs()
    assert (tmp_path / "jit_others-cache").exists()
