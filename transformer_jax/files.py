"""Writes a text file whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def write_whole(path: Path) -> Iterator[IO[str]]:
    """Opens a UTF-8 text file that replaces `path` when the block ends without an error.

    The text is first written to a temporary file beside `path` and flushed to the disk. After an
    error or a crash, `path` is what it was before.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
