"""The folder in which tokenizers and tokenized corpora are kept."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformer_jax.config import DataConfig
from transformer_jax.errors import UserError
from transformer_jax.files import cache_folder, local_path


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
