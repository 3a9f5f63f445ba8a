"""Locates what is kept on disk between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Returns the folder `name` of this package in the user's cache; it may not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "transformer_jax" / name
