"""Reads text, TSV and JSONL files: UTF-8, plain or compressed, with or without a byte order mark.

Only a line feed ends a line. `windows` groups lines as they arrive.
"""

import bz2
import codecs
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import queue
import re
import shutil
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeGuard

from transformer_jax.errors import UserError, about, is_unicode
from transformer_jax.files import cache_folder, json_digest, parse_json, temporaries, write_whole

_SETTLED = 2_000_000_000
"""Nanoseconds without a change after which the times of a file stand for its contents."""

_COMPRESSED = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
"""What opens a file, by the end of its name."""

_OTHERS = {
    "a gzip file, whose name must end in .gz": rb"\x1f\x8b",
    "an xz file, whose name must end in .xz": rb"\xfd7zXZ\0",
    "a bzip2 file, whose name must end in .bz2": rb"BZh[1-9]1AY&SY",
    "a Zstandard file": rb"\x28\xb5\x2f\xfd",
    "an LZ4 file": rb"\x04\x22\x4d\x18",
    "a zip archive": rb"PK\x03\x04",
    "a 7z archive": rb"7z\xbc\xaf\x27\x1c",
    "a tar archive": rb"(?s:.{257})ustar",
    "a PDF document": rb"%PDF-",
    "a SQLite database": rb"SQLite format 3\0",
    "a Parquet file": rb"PAR1\x15",
    "an Arrow file": rb"ARROW1\0|\xff\xff\xff\xff",
    "a picture": rb"\x89PNG|\xff\xd8\xff|GIF8[79]a",
    "a program": rb"\x7fELF",
    "a pickle": rb"\x80[\2-\5]",
    "an Office document of an old kind": rb"\xd0\xcf\x11\xe0",
    "UTF-16 or UTF-32 text": (
        rb"\xff\xfe|\xfe\xff|\0\0\xfe\xff|[^\0]\0[^\0]\0|\0[^\0]\0[^\0]|[^\0]\0\0\0|\0\0\0[^\0]"
    ),
}
"""Files that are no text for us, each with a pattern of how it begins."""

_copies: dict[str, Path] = {}
"""Copies of what can be read only once, by its path."""


def uncompressed_name(path: str) -> str:
    """Returns the name of a file without the end that says how it is compressed."""
    return path.removesuffix(next(filter(path.endswith, _COMPRESSED), ""))


def make_rereadable(path: str) -> None:
    """Copies what can be read only once, such as a pipe, to a temporary file. Everything that reads
    `path` in this process then reads the copy."""
    file = Path(path)
    is_pipe = path == "-" or (file.exists() and not (file.is_file() or file.is_dir()))
    if is_pipe and path not in _copies:
        descriptor, copy = tempfile.mkstemp(prefix="transformer-jax-")
        temporaries.callback(Path(copy).unlink, missing_ok=True)
        with os.fdopen(descriptor, "wb") as output, _open(path) as pipe:
            shutil.copyfileobj(pipe, output)
        _copies[path] = Path(copy)


def read_lines(path: str) -> Iterator[str]:
    """Yields the lines of a text file without their ends; "-" is standard input.

    UserError: the file is missing, unreadable, damaged or not UTF-8 (the line and the byte are
    named).
    """
    with _open(path) as file:
        for number, raw in enumerate(file, 1):
            line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if not line:  # the file is a byte order mark and nothing else
                return
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}: line {number}, byte {error.start + 1}:"
                    f" 0x{line[error.start]:02x} is not UTF-8; must be UTF-8 text"
                ) from error
            yield text.removesuffix("\n").removesuffix("\r")


def text_digest(path: str) -> str:
    """Returns the SHA-256 of a file's text: decompressed, and without a byte order mark.

    It is kept in the user's cache and read from there while the file's size and times are the same.
    """
    if path in _copies or not Path(path).is_file():
        return _compute_digest(path)
    about = Path(path).stat()
    times = about.st_mtime_ns, about.st_ctime_ns
    state = [str(Path(path).absolute()), about.st_size, *times]
    with suppress(OSError, ValueError, KeyError, TypeError):  # not there, or damaged
        stored = parse_json((cache_folder("digests") / json_digest(state)).read_bytes())
        if stored["sha256"] == json_digest([state, stored["text"]]):
            return stored["text"]
    digest = _compute_digest(path)
    # Clocks of file systems tick slowly: a change that follows at once would have the same times.
    if time.time_ns() - max(times) > _SETTLED:
        with suppress(OSError, ValueError):
            folder = cache_folder("digests")
            folder.mkdir(parents=True, exist_ok=True)
            stored = {"text": digest, "sha256": json_digest([state, digest])}
            write_whole(folder / json_digest(state), json.dumps(stored))
    return digest


def _compute_digest(path: str) -> str:
    with _open(path) as file:
        begin = file.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)
        return hashlib.file_digest(file, lambda: hashlib.sha256(begin)).hexdigest()


def read_text(source: str, target: str) -> Iterator[tuple[str, str]]:
    """Yields the pairs of two text files. UserError: they differ in the number of lines."""
    counts = [0, 0]
    for lines in itertools.zip_longest(read_lines(source), read_lines(target)):
        counts = [n + (line is not None) for n, line in zip(counts, lines, strict=True)]
        if counts[0] == counts[1]:
            yield lines
    if counts[0] != counts[1]:
        raise UserError(
            f"{source} has {counts[0]} lines and {target} has {counts[1]}: parallel files must have"
            " the same number of lines"
        )


def read_tsv(path: str) -> Iterator[tuple[str, str]]:
    """Yields the pairs of a TSV file. UserError: a line without exactly one tab, by number."""
    for number, line in enumerate(read_lines(path), 1):
        source, *rest = line.split("\t")
        if len(rest) != 1:
            raise UserError(f"{path}: line {number}: {len(rest)} tabs; must be SOURCE, tab, TARGET")
        yield source, rest[0]


def read_jsonl(path: str, fields: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the pairs of a JSONL file, whose objects hold them in `fields`.

    UserError: a line that is not such an object, by number.
    """
    for number, line in enumerate(read_lines(path), 1):
        with about(f"{path}: line {number}"):
            record = parse_json(line)
        values = record if isinstance(record, dict) else {}
        source, target = (values.get(field) for field in fields)
        if not _is_text(source) or not _is_text(target):
            raise UserError(
                f"{path}: line {number}: must be an object with Unicode texts in {fields[0]!r} and"
                f" {fields[1]!r} (data.fields)"
            )
        yield source.replace("\n", " "), target.replace("\n", " ")


def _is_text(value: object) -> TypeGuard[str]:
    """Returns whether a JSON value is a string that can be written as UTF-8."""
    return isinstance(value, str) and is_unicode(value)


@contextmanager
def _open(path: str) -> Iterator[io.BufferedReader]:
    """Opens a file's bytes, decompressed. Errors in opening or reading them become UserError.

    UserError: it begins as files of other kinds do.
    """
    kind = path.removeprefix(uncompressed_name(path))
    try:
        with _open_bytes(path, kind) as file:
            begin = file.peek(512)
            kinds = (name for name, pattern in _OTHERS.items() if re.match(pattern, begin))
            if found := next(kinds, None):
                raise UserError(
                    f"{path}: is {found}; must be UTF-8 text, plain or compressed as .gz, .xz or"
                    " .bz2"
                )
            yield file
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        if reason is None:  # of a library that decompresses
            raise UserError(f"{path}: damaged {kind} file ({error})") from error
        raise UserError(f"{path}: {reason}; must be a readable file") from error


def _open_bytes(path: str, kind: str) -> io.BufferedReader:
    if path in _copies:
        return _copies[path].open("rb")
    if path == "-":  # With sys.stdin.buffer, Python would crash if it ended while a thread reads.
        return open(sys.stdin.fileno(), "rb", closefd=False)
    if kind:
        return io.BufferedReader(_COMPRESSED[kind](path))  # reads lines several times faster
    return Path(path).open("rb")


PATIENCE = 0.2
"""Seconds after which a window ends if no line arrives."""


def windows(lines: Iterable[str], size: int) -> Generator[list[str], None, None]:
    """Yields lists of up to `size` lines, fewer if none arrives for `PATIENCE` seconds or at the
    end.

    Lines that are not there already, as a list's are, are read in a thread, at most two windows
    ahead. An error in `lines` is raised after the window of the lines before it.
    """
    if isinstance(lines, Sequence):
        yield from (list(lines[i : i + size]) for i in range(0, len(lines), size))
        return
    arrived: queue.Queue[str | Exception | None] = queue.Queue(2 * size)
    abandoned = threading.Event()

    def read() -> None:
        end = None
        try:
            for line in lines:
                arrived.put(line)
                if abandoned.is_set():
                    return
        except Exception as error:
            end = error
        arrived.put(end)

    threading.Thread(target=read, name="read lines", daemon=True).start()
    try:
        item = arrived.get()
        while isinstance(item, str):
            window = [item]
            with suppress(queue.Empty):
                while len(window) < size and isinstance(item := arrived.get(timeout=PATIENCE), str):
                    window.append(item)
            yield window
            if isinstance(item, str):  # the last line of the window
                item = arrived.get()
        if item is not None:
            raise item
    finally:  # If the caller stops early, the thread may be blocked on a full queue.
        abandoned.set()
        with suppress(queue.Empty):
            arrived.get_nowait()
