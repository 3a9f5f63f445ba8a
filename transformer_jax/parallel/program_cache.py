"""Keeps compiled programs between runs, in JAX's compilation cache.

They are machine code, which is executed as it is found. Therefore the folder is private to the
user unless the environment variable `JAX_COMPILATION_CACHE_DIR` names one, and files that have
changed since they were found whole are deleted: JAX does not check them, nor replace a damaged one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import sys
import zlib
from importlib import import_module
from pathlib import Path

import jax

from transformer_jax.cache_folder import cache_folder
from transformer_jax.errors import UserError
from transformer_jax.files import write_whole
from transformer_jax.json_text import parse_json
from transformer_jax.parallel.processes import is_coordinator

logger = logging.getLogger(__name__)

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
LEAST_SECONDS = "jax_persistent_cache_min_compile_time_secs"
"""JAX's option for how long a program must take to compile for it to be kept."""

LIMIT = 2**30
"""Number of bytes to which the user's own folder is reduced when a process starts."""

_DIGESTS = "digests.json"
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


def cache_programs() -> None:
    """Keeps compiled programs between runs, in the user's cache folder or that of `VARIABLE`.

    Deletes damaged files, so that these programs are compiled and stored again, and the oldest ones
    beyond `LIMIT` bytes in the user's own folder. Warns, and does without a cache, if the folder
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
        folder.mkdir(mode=0o777 if shared else 0o700, parents=True, exist_ok=True)
        _check_mode(folder, private=shared is None)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, os.strerror(13))
        if is_coordinator():  # the only one to write there
            _sweep(folder, LIMIT if shared is None else None)
    except OSError as error:
        logger.warning(
            "compiled programs are not kept: %s: %s; name another folder in %s",
            *(folder, error.strerror or error, VARIABLE),
        )
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if shared is None:
        jax.config.update("jax_compilation_cache_dir", str(folder))


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


def _sweep(folder: Path, limit: int | None) -> None:
    """Deletes the damaged files of the newest `LIMIT` bytes; with a limit, older ones, too."""
    stored, digests = _read_digests(folder), dict[str, str]()
    damaged: list[str] = []
    total = 0
    for path in sorted(folder.glob("*-cache"), key=_written, reverse=True):
        total += _size(path)
        if total > LIMIT:
            if limit is not None:
                _delete(path)
            continue
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # another process deletes, too
            continue
        digest = hashlib.sha256(content).hexdigest()
        if stored[path.name] == digest if path.name in stored else _is_whole(content):
            digests[path.name] = digest
        else:
            _delete(path)
            damaged.append(path.name)
    if damaged:
        logger.warning(
            "%s: %d damaged files are deleted (%s), and their programs compiled again",
            *(folder, len(damaged), ", ".join(damaged)),
        )
    if digests != stored:
        with write_whole(folder / _DIGESTS) as file:
            json.dump(digests, file, indent=1)


def _is_whole(content: bytes) -> bool:
    """Returns whether a file is not cut: JAX compresses with zstandard if it is installed."""
    try:
        if content.startswith(_ZSTANDARD):
            name = "zstandard" if sys.version_info < (3, 14) else "compression.zstd"
            import_module(name).decompress(content)
        else:
            zlib.decompress(content)
    except Exception:  # each library has errors of its own
        return False
    return True


def _read_digests(folder: Path) -> dict[str, str]:
    """Returns the digests of the files that were whole; of none if their own file is damaged."""
    try:
        digests = parse_json((folder / _DIGESTS).read_bytes())
    except (FileNotFoundError, UserError):
        return {}
    return digests if isinstance(digests, dict) else {}


def _written(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except PermissionError:  # of another user, in a shared folder with a sticky bit
        logger.warning("%s: is damaged or old, and cannot be deleted", path)
