"""Keeps compiled programs between runs, in JAX's compilation cache.

They are machine code, which is executed as it is found. Therefore the folder is private to the
user unless the environment variable `JAX_COMPILATION_CACHE_DIR` names one.

JAX refuses a damaged file by its checksum when it reads it, but never replaces it, and a killed
process may leave one. Therefore the files that have changed since the last start are checked. The
folder is bounded here: JAX's own bound needs filelock, and stores nothing more once one of the
files is missing that it keeps beside the programs.
"""

import errno
import logging
import os
import stat
import time
import zlib
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import jax

from transformer_jax.errors import UserError, is_unicode, printable
from transformer_jax.files import cache_folder
from transformer_jax.parallel.processes import is_coordinator

logger = logging.getLogger(__name__)

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
LEAST_SECONDS = "jax_persistent_cache_min_compile_time_secs"
"""JAX's option for how long a program must take to compile for it to be kept."""
ENABLED = "jax_enable_compilation_cache"
FOLDER = "jax_compilation_cache_dir"
"""JAX's option for the folder, also where `VARIABLE` sets it."""

LIMIT = 2**30
"""Number of bytes to which the user's own folder is reduced when a process starts."""

SEARCH = "-search"
"""The end of the names of the files of searches, which are checked and bounded as JAX's are."""

_SWEPT = ".swept"  # whose date is that of the last sweep
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


def cache_programs() -> None:
    """Keeps compiled programs between runs, in the user's cache folder or that of `VARIABLE`.

    In the user's own folder, deletes damaged files, so that their programs are compiled and stored
    again, and the oldest ones beyond `LIMIT` bytes. Warns, and does without a cache, if the folder
    cannot be written.

    UserError: other users can replace its files.
    """
    shared = os.environ.get(VARIABLE)
    if shared == "" or (shared is not None and "://" in shared):
        return  # JAX caches nothing, or in object storage
    folder = cache_folder("programs") if shared is None else Path(shared)
    if getattr(jax.config, LEAST_SECONDS) == 1:  # JAX's default leaves out what searches need
        jax.config.update(LEAST_SECONDS, 0.1)
    try:
        if not is_unicode(str(folder)):  # which JAX could not take
            raise OSError(errno.EILSEQ, os.strerror(errno.EILSEQ))
        folder.mkdir(mode=0o777 if shared else 0o700, parents=True, exist_ok=True)
        _check_mode(folder, private=shared is None)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, os.strerror(13))
        if shared is None and is_coordinator():  # the only one to write there
            _sweep(folder)
    except OSError as error:
        why = printable(f"{folder}: {error.strerror or error}; name another folder in {VARIABLE}")
        logger.warning("compiled programs are not kept: %s", why)
        jax.config.update(ENABLED, False)
        return
    if shared is None:
        jax.config.update(FOLDER, str(folder))


def program_folder() -> Path | None:
    """Returns the folder of compiled programs; None: they are not kept, or not on a disk."""
    name, kept = getattr(jax.config, FOLDER), getattr(jax.config, ENABLED)
    return Path(name) if kept and name and "://" not in name else None


def _check_mode(folder: Path, private: bool) -> None:
    """Checks who can replace files in a folder. UserError: others can."""
    about = folder.stat()
    mode = stat.S_IMODE(about.st_mode)
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise UserError(
            f"{folder}: has mode {mode:04o}, with which every user can replace the programs that "
            f"run from it; run chmod 0700 on it, or name another folder in {VARIABLE}"
        )
    if private and about.st_uid != os.geteuid():
        raise UserError(
            f"{folder}: belongs to user {about.st_uid}, whose programs would be run; name a folder "
            f"of your own in {VARIABLE}"
        )
    if private and mode != 0o700:
        folder.chmod(0o700)


def _sweep(folder: Path) -> None:
    """Deletes the files that have changed since the last sweep and are damaged, and the oldest ones
    beyond `LIMIT` bytes."""
    swept = folder / _SWEPT
    last = swept.stat().st_mtime_ns if swept.exists() else time.time_ns()
    swept.touch()  # first, so that the next sweep looks at what is written meanwhile
    damaged, total = [], 0
    files = (path for path in folder.iterdir() if path.name.endswith(("-cache", SEARCH)))
    for path in sorted(files, key=_date, reverse=True):
        with suppress(FileNotFoundError):  # another process deletes, too
            total += path.stat().st_size
            is_damaged = _date(path) >= last and not _is_whole(path.read_bytes())
            if is_damaged or total > LIMIT:
                path.unlink()
            if is_damaged:
                damaged.append(path.name)
    if damaged:
        what = f"{len(damaged)} damaged files are deleted ({', '.join(damaged)})"
        logger.warning("%s: %s, and their programs compiled again", folder, what)


def _date(path: Path) -> int:
    """Returns when a file was written, in nanoseconds; 0: it is gone."""
    with suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return 0


def _is_whole(content: bytes) -> bool:
    """Returns whether a file is not cut: JAX compresses with zstandard if it is installed."""
    try:
        if content.startswith(_ZSTANDARD):
            import_module("zstandard").decompress(content)
        else:
            zlib.decompress(content)
    except Exception:  # each library has errors of its own
        return False
    return True
