"""A lock on a run, so that no two trainings write to it at once.

Where the file system has locks, the system frees the lock of a process that dies. Elsewhere, such
as in object storage, the holder writes to the lock file every `BEAT` seconds, and another process
takes the lock once it has seen no change for `STALE` seconds. Process numbers say nothing, since
containers and machines have their own.
"""

import errno
import fcntl
import itertools
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from transformer_jax.errors import UserError
from transformer_jax.files import AnyPath, write_whole
from transformer_jax.parallel.processes import end_now, is_coordinator, share_errors

logger = logging.getLogger(__name__)

NAME = ".lock"
BEAT, STALE = 10.0, 60.0
"""Seconds between two signs of the holder, and without one until it is taken for dead."""

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def locked(folder: AnyPath) -> Iterator[None]:
    """Holds the lock of a run in process 0. Makes its folder, and deletes it again if it is empty
    in the end.

    UserError, in all processes: another training holds it; the message names its machine and when
    it began.
    """
    with ExitStack() as stack:
        with share_errors():
            if is_coordinator():
                stack.enter_context(_locked(folder))
        yield


@contextmanager
def _locked(folder: AnyPath) -> Iterator[None]:
    if not isinstance(folder, Path):
        with _beating(folder):
            yield
        return
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        file = _lock_file(folder)
        with _beating(folder) if file is None else _writing(file, folder):
            yield
    finally:
        with suppress(OSError):  # it holds a run
            for path in missing:
                path.rmdir()


@contextmanager
def _writing(file: IO[str], folder: Path) -> Iterator[None]:
    """Writes the holder to a locked file, and deletes it in the end."""
    with file:
        file.truncate(0)
        file.write(_this_holder())
        file.flush()
        try:
            yield
        finally:
            (folder / NAME).unlink(missing_ok=True)


def _lock_file(folder: Path) -> IO[str] | None:
    """Returns the locked file; None: the file system has no locks. UserError: it is locked."""
    while True:
        file = (folder / NAME).open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            with file:
                if error.errno in _UNSUPPORTED:
                    return None
                file.seek(0)
                raise _held(folder, file.read()) from error
        with suppress(FileNotFoundError):  # unless its holder has deleted it meanwhile
            if os.path.samestat(os.fstat(file.fileno()), (folder / NAME).stat()):
                return file
        file.close()


@contextmanager
def _beating(folder: AnyPath) -> Iterator[None]:
    """Holds a lock that consists of a file that changes."""
    path, holder = folder / NAME, f"{_this_holder()}\n{secrets.token_hex(8)}"
    numbers, released = itertools.count(), threading.Event()

    def write() -> None:
        write_whole(path, f"{holder} {next(numbers)}")

    def beat() -> None:
        while not released.wait(BEAT):
            with suppress(Exception):  # the next one may arrive
                if (text := _read(path)) and not text.startswith(holder):
                    # Another process has taken the lock of a holder that gave no sign for long,
                    # such as one that was suspended, and may be writing to the run already.
                    error = f"{_held(folder, text)}; this process has lost the run"
                    print(f"transformer-jax: error: {error}", file=sys.stderr)
                    end_now(2)
                write()

    _wait_until_stale(folder, path)
    write()
    time.sleep(min(1.0, BEAT))  # for others that have begun to write at the same time
    if not (text := _read(path)).startswith(holder):
        raise _held(folder, text)
    thread = threading.Thread(target=beat, name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        released.set()
        thread.join()
        if _read(path).startswith(holder):
            path.unlink(missing_ok=True)


def _wait_until_stale(folder: AnyPath, path: AnyPath) -> None:
    """Waits if there may be a holder. UserError: there is one."""
    seen = _read(path)
    if not seen:
        return
    logger.warning("%s; waiting up to %g seconds for a sign of life", _held(folder, seen), STALE)
    end = time.monotonic() + STALE
    while time.monotonic() < end:
        time.sleep(min(1.0, STALE / 10))
        if (text := _read(path)) != seen:
            if not text:
                return
            raise _held(folder, text)


def _read(path: AnyPath) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _held(folder: AnyPath, text: str) -> UserError:
    holder = text.partition("\n")[0] or "another process"
    return UserError(f"run {folder}: is in use by {holder}; wait for its end, or end it")


def _this_holder() -> str:
    began = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"a process on {socket.gethostname()} since {began}"
