"""The cache of tokenizers and tokenized corpora. An entry of the latter is a folder that is written
once and memory-mapped.

    source.ids, source.offsets, target.ids, target.offsets   raw numbers
    report.json                                               their sizes and digests, and counts

An entry is written as NAME.TOKEN and renamed. A process that writes or uses an entry holds a lock
on its report.json. What a killed process has left is therefore known by its lock, which is free,
and an entry in use is not deleted to make room.

When an entry is opened, the sizes of its files are checked, and the digests of those of up to
`HASHED_BYTES`, so that opening takes the same time whatever the size of the corpus.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from transformer_jax.config import DataConfig
from transformer_jax.data.buckets import Lengths
from transformer_jax.data.ragged import Ragged
from transformer_jax.errors import UserError
from transformer_jax.files import cache_folder, json_digest, local_path, parse_json

MAX_BYTES = 32 * 2**30
"""The size of all entries beyond which those that were not used for the longest time go."""

HASHED_BYTES = 2**26
"""The size up to which a file is compared with its digest when it is opened, which then takes up to
a tenth of a second. The files of most corpora are smaller."""

_ABANDONED = 3600.0
"""Seconds without a write after which a folder that cannot be locked counts as abandoned."""

_REPORT = "report.json"
_TYPES = {"ids": "<i4", "offsets": "<i8"}
_FILES = {f"{side}.{part}": _TYPES[part] for side in ("source", "target") for part in _TYPES}
"""The arrays: the names of the files and the types of their raw numbers."""

Fill = Callable[[Callable[[Ragged, Ragged], None]], Any]
"""Writes the rows of an entry: it is called with a function that appends rows of source and target,
and returns the counts to store, as JSON values."""


def cache_of(config: DataConfig) -> Path:
    """Returns the folder, which may not exist yet. UserError: `data.cache` is a URL."""
    return local_path(config.cache, "data.cache") if config.cache else cache_folder("corpora")


@contextmanager
def writing_to_cache(folder: Path) -> Iterator[None]:
    """Creates the folder if it is missing. UserError: it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(
            f"data.cache: {error.strerror} while writing to {folder}; must be a folder with"
            " enough space that you can write to"
        ) from error


def check_cache(folder: Path) -> None:
    """Checks that the folder can be written to, before work whose result goes there.

    UserError: as `writing_to_cache`.
    """
    with writing_to_cache(folder), tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"0")


def share(path: Path, cache: Path) -> None:
    """Lets all who may read the cache read a file or a folder in it, whatever the umask."""
    mode = 0o755 if path.is_dir() else 0o644
    path.chmod((cache.stat().st_mode | 0o700) & mode)


class Lock:
    """A shared lock on an open file, where the file system has locks; its end releases it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        with suppress(OSError):  # the writer has not released its own yet, or there are no locks
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        weakref.finalize(self, os.close, self._file)


class Entry(NamedTuple):
    """An open entry. It is not deleted to make room while its lock exists."""

    source: Ragged
    target: Ragged
    lengths: Lengths
    counts: Any  # JSON
    lock: Lock


def read(path: Path) -> Entry | None:
    """Opens an entry; None: it is missing, not readable or found to be damaged."""
    try:
        lock = Lock(path / _REPORT)
        stored = parse_json((path / _REPORT).read_bytes())
        contents = stored["contents"]
        if stored["sha256"] != json_digest(contents):
            return None
        arrays = [_open(path / name, *contents["files"][name]) for name in _FILES]
        with suppress(OSError):  # of another user
            os.utime(path / _REPORT)  # this use
        lengths = Lengths(*(np.array(each, int) for each in contents["lengths"]))
        return Entry(Ragged(*arrays[:2]), Ragged(*arrays[2:]), lengths, contents["counts"], lock)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _open(path: Path, size: int, digest: str) -> np.ndarray:
    """Returns the numbers of a file, memory-mapped. ValueError: it is damaged."""
    if path.stat().st_size != size:
        raise ValueError(path)
    raw = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
    if size <= HASHED_BYTES and hashlib.blake2b(raw.data).hexdigest() != digest:
        raise ValueError(path)
    return np.asarray(raw).view(_FILES[path.name])  # slicing a memmap takes microseconds


def write(path: Path, fill: Fill) -> None:
    """Writes an entry, unless another process has completed the same one in the meantime.

    UserError: the folder cannot be written to.
    """
    with writing_to_cache(path.parent):
        _make_room(path)
        with _temporary(path) as (folder, report):
            contents = _write_files(folder, fill)
            stored = {"sha256": json_digest(contents), "contents": contents}
            report.write(json.dumps(stored).encode())
            report.flush()
            for file in (folder, *folder.iterdir()):
                share(file, path.parent)
            _move(folder, path)
        _make_room(path)


def idle_seconds(path: Path) -> float:
    """Returns the seconds since a process last wrote to an unfinished entry; inf: none does."""
    return min(map(_age, path.parent.glob(f"{path.name}.*")), default=math.inf)


def _write_files(folder: Path, fill: Fill) -> dict[str, Any]:
    """Writes the arrays. Returns what the report holds."""
    ends, lengths = np.zeros(2, np.int64), Lengths.of(np.zeros((0, 2), int))
    digests = {name: hashlib.blake2b() for name in _FILES}
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / name).open("wb")) for name in _FILES}

        def write_numbers(name: str, numbers: np.ndarray) -> None:
            data = numbers.astype(_FILES[name]).tobytes()
            files[name].write(data)
            digests[name].update(data)

        def append(source: Ragged, target: Ragged) -> None:
            nonlocal lengths
            for i, (side, rows) in enumerate((("source", source), ("target", target))):
                write_numbers(f"{side}.ids", rows.ids)
                write_numbers(f"{side}.offsets", rows.offsets[1:] + ends[i])
                ends[i] += rows.offsets[-1]
            both = np.stack([source.lengths(), target.lengths()], axis=1)
            lengths = lengths.joined(Lengths.of(both))

        for side in ("source", "target"):
            write_numbers(f"{side}.offsets", np.zeros(1))
        counts = fill(append)
        written = {name: [file.tell(), digests[name].hexdigest()] for name, file in files.items()}
    return {"files": written, "lengths": [each.tolist() for each in lengths], "counts": counts}


@contextmanager
def _temporary(path: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """Makes a folder for a new entry, with its report.json, locked; it is deleted if it remains."""
    folder = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    folder.mkdir()
    try:
        with (folder / _REPORT).open("wb") as report:
            with suppress(OSError):  # there are no locks
                fcntl.flock(report, fcntl.LOCK_EX)
            yield folder, report
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move(folder: Path, path: Path) -> None:
    """Renames a finished entry, unless another process has completed the same one."""
    try:
        folder.rename(path)
    except OSError:
        if read(path) is None:
            _delete(path)
            folder.rename(path)


def _delete(path: Path) -> None:
    """Deletes a file, or an entry, which has another name meanwhile."""
    if path.is_file():
        path.unlink()
    else:
        renamed = path.rename(path.with_name(f"{path.name}.{secrets.token_hex(8)}"))
        shutil.rmtree(renamed, ignore_errors=True)


def _make_room(new: Path) -> None:
    """Deletes what killed processes have left in the cache of a new entry and, beyond `MAX_BYTES`,
    the entries that were not used for the longest time."""
    total = 0
    for path in sorted(new.parent.iterdir(), key=_age):
        is_entry = re.fullmatch("[0-9a-f]{64}", path.name)
        total += _size(path) if is_entry else 0
        unfinished = re.fullmatch(r"[0-9a-f]{64}\.\w+", path.name) and path.is_dir()
        unwanted = total > MAX_BYTES if is_entry else unfinished or path.suffix == ".tmp"
        if unwanted and path != new and _is_unused(path):
            with suppress(OSError):  # of another user
                _delete(path)


def _is_unused(path: Path) -> bool:
    """Returns whether no process writes or uses an entry."""
    try:
        with (path / _REPORT).open("rb") as report:
            fcntl.flock(report, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except OSError:  # not locked yet, or there are no locks
        return _age(path) > _ABANDONED


def _age(path: Path) -> float:
    """Returns the seconds since an entry was last used or written to, or a file written."""
    times = [0.0]
    with suppress(OSError):
        times += [file.stat().st_mtime for file in (path, *path.glob("*"))]
    return time.time() - max(times)


def _size(path: Path) -> int:
    with suppress(OSError):
        return sum(file.stat().st_size for file in path.iterdir())
    return 0
