"""Entries of the cache of tokenized corpora: folders that are written once and memory-mapped.

    source.ids, source.offsets, target.ids, target.offsets   raw numbers
    blocks                                                    digests of blocks of these files
    report.json                                               sizes of the files, and counts

An entry is written as NAME.TOKEN and renamed. A process that writes or uses an entry holds a lock
on its report.json. What a killed process has left is therefore known by its lock, which is free,
and an entry in use is not deleted to make room.

A block is compared with its digest when it is first read, so that opening an entry takes the same
time whatever its size.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from transformer_jax.data.cache import share, writing_to_cache
from transformer_jax.data.lengths import Lengths
from transformer_jax.data.ragged import Ragged
from transformer_jax.errors import UserError
from transformer_jax.files import json_digest, parse_json

MAX_BYTES = 32 * 2**30
"""The size of all entries beyond which those that were not used for the longest time go."""

_BLOCK, _DIGEST = 2**16, 16  # bytes
_CHECKED_FIRST = 1024
"""The number of blocks of a file that are checked when an entry is opened. If one of them is
damaged, the entry is made again at once, which most corpora are small enough for."""

_ABANDONED = 3600.0
"""Seconds without a write after which a folder that cannot be locked is taken for a remain."""

_REPORT, _BLOCKS = "report.json", "blocks"
_FILES = {
    "source.ids": "<i4",
    "source.offsets": "<i8",
    "target.ids": "<i4",
    "target.offsets": "<i8",
}
"""The arrays: the names of the files and the types of their raw numbers."""


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
        files = [_File(path / name, contents["sizes"][name]) for name in _FILES]
        digests = np.memmap(path / _BLOCKS, np.uint8, "r").reshape(-1, _DIGEST)
        if len(digests) != sum(file.blocks for file in files):
            return None
        ends = np.cumsum([file.blocks for file in files])
        for file, own in zip(files, np.split(digests, ends[:-1]), strict=True):
            file.digests = own
            file.check_blocks(np.arange(min(file.blocks, _CHECKED_FIRST)))
        with suppress(OSError):  # of another user
            os.utime(path / _REPORT)  # this use
        lengths = Lengths(*(np.array(each, int) for each in contents["lengths"]))
        return Entry(_ragged(files[:2]), _ragged(files[2:]), lengths, contents["counts"], lock)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(path: Path, fill: Callable[[Callable[[Ragged, Ragged], None]], Any]) -> None:
    """Writes an entry, unless another process has completed the same one in the meantime.

    fill: called with a function that appends rows of source and target; returns the counts to
    store, as JSON values. UserError: the folder cannot be written to.
    """
    with writing_to_cache(path.parent):
        _sweep(path.parent)
        with _temporary(path) as (folder, report):
            counts, lengths = _write_files(folder, fill)
            contents = {
                "sizes": {name: (folder / name).stat().st_size for name in _FILES},
                "lengths": [each.tolist() for each in lengths],
                "counts": counts,
            }
            stored = {"sha256": json_digest(contents), "contents": contents}
            report.write(json.dumps(stored).encode())
            report.flush()
            for file in (folder, *folder.iterdir()):
                share(file, path.parent)
            _move(folder, path)
        _make_room(path)


def last_write(path: Path, since: float) -> float:
    """Returns when a process last wrote to an unfinished entry, if after `since`, or `since`."""
    times = [since]
    with suppress(OSError):  # files come and go
        times += [file.stat().st_mtime for file in path.parent.glob(f"{path.name}.*/*")]
    return max(times)


class _File:
    """A memory-mapped file of an entry. Its blocks are checked when they are first read."""

    digests: UInt8[np.ndarray, "B 16"]

    def __init__(self, path: Path, size: int) -> None:
        if path.stat().st_size != size:
            raise ValueError(path)
        self._path, self._type = path, np.dtype(_FILES[path.name])
        # As plain arrays, since slicing a memmap takes microseconds.
        self._bytes = np.asarray(np.memmap(path, np.uint8, "r")) if size else np.zeros(0, np.uint8)
        self.blocks = -(-size // _BLOCK)
        self._checked = np.zeros(self.blocks, bool)

    @property
    def array(self) -> np.ndarray:
        """The numbers, not checked."""
        return self._bytes.view(self._type)

    def check(self, items: Int[np.ndarray, " N"]) -> None:
        """Checks the blocks that hold these items. UserError: one is damaged."""
        blocks = items * self._type.itemsize // _BLOCK
        new = blocks[~self._checked[blocks]]
        if not len(new):
            return
        try:
            self.check_blocks(np.unique(new))
        except ValueError as error:
            entry = self._path.parent
            with suppress(OSError):  # it belongs to another user
                _delete(entry)
            first = f"delete {entry} and " if entry.exists() else ""
            raise UserError(
                f"data.cache: {self._path} is damaged; {first}run the same command again to make it"
                " anew"
            ) from error

    def check_blocks(self, blocks: Int[np.ndarray, " N"]) -> None:
        """Checks blocks by number. ValueError: one is damaged."""
        for block in blocks.tolist():
            found = _block_digest(self._bytes[block * _BLOCK : (block + 1) * _BLOCK])
            if found != self.digests[block].tobytes():
                raise ValueError(self._path)
            self._checked[block] = True


def _ragged(files: list[_File]) -> Ragged:
    by_name = dict(zip(("ids", "offsets"), files, strict=True))
    ids, offsets = (file.array for file in files)
    return Ragged(ids, offsets, lambda name, items: by_name[name].check(items))


def _write_files(
    folder: Path, fill: Callable[[Callable[[Ragged, Ragged], None]], Any]
) -> tuple[Any, Lengths]:
    """Writes the arrays and their digests. Returns the counts, and the lengths of the pairs."""
    ends, lengths = np.zeros(2, np.int64), Lengths.of(np.zeros((0, 2), int))
    with ExitStack() as stack:
        files = {name: stack.enter_context(_Hashed(folder / name)) for name in _FILES}

        def append(source: Ragged, target: Ragged) -> None:
            nonlocal lengths
            for i, (side, rows) in enumerate((("source", source), ("target", target))):
                files[f"{side}.ids"].write(rows.ids.astype("<i4").tobytes())
                files[f"{side}.offsets"].write((rows.offsets[1:] + ends[i]).astype("<i8").tobytes())
                ends[i] += rows.offsets[-1]
            both = np.stack([source.lengths(), target.lengths()], axis=1)
            lengths = lengths.joined(Lengths.of(both))

        for side in ("source", "target"):
            files[f"{side}.offsets"].write(np.zeros(1, "<i8").tobytes())
        counts = fill(append)
    (folder / _BLOCKS).write_bytes(b"".join(file.digests() for file in files.values()))
    return counts, lengths


class _Hashed:
    """A file that is written, with digests of its blocks."""

    def __init__(self, path: Path) -> None:
        self._file, self._rest, self._digests = path.open("wb"), b"", bytearray()

    def __enter__(self) -> _Hashed:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        data = self._rest + data
        whole = len(data) // _BLOCK * _BLOCK
        for start in range(0, whole, _BLOCK):
            self._digests += _block_digest(data[start : start + _BLOCK])
        self._rest = data[whole:]

    def digests(self) -> bytes:
        """Returns the digests of all blocks, of which the last one may be shorter."""
        return bytes(self._digests) + (_block_digest(self._rest) if self._rest else b"")


def _block_digest(block: Any) -> bytes:
    return hashlib.blake2b(block, digest_size=_DIGEST).digest()


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
    """Deletes an entry, which has another name meanwhile."""
    remains = path.rename(path.with_name(f"{path.name}.{secrets.token_hex(8)}"))
    shutil.rmtree(remains, ignore_errors=True)


def _sweep(cache: Path) -> None:
    """Deletes what killed processes have left in the cache."""
    for path in cache.iterdir():
        entry = re.fullmatch(r"[0-9a-f]{64}\.\w+", path.name) and path.is_dir()
        if entry and _is_unused(path):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.endswith(".tmp") and _age(path) > _ABANDONED:  # of `write_whole`
            with suppress(OSError):
                path.unlink()


def _make_room(new: Path) -> None:
    """Deletes the entries that were not used for the longest time, while there are too many."""
    entries = [path for path in new.parent.iterdir() if re.fullmatch("[0-9a-f]{64}", path.name)]
    sizes = {path: _size(path) for path in entries}
    total = sum(sizes.values())
    for path in sorted(entries, key=_age, reverse=True):
        if total > MAX_BYTES and path != new and _is_unused(path):
            with suppress(OSError):  # of another user
                _delete(path)
                total -= sizes[path]


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
