"""Result files: JSON with one header that says how, where and from what they were made."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from transformer_jax import run

FOLDER = Path("results")

HEADER = ("command", "commit", "dirty", "machine", "versions", "date")
"""The keys every result file begins with."""


def write(name: str, command: str, values: dict[str, Any], folder: Path = FOLDER) -> Path:
    """Writes results/NAME.json: the header, then `values`. `command` derives the file again."""
    header = dict(
        zip(HEADER, (command, *_state(), machine(), run.versions(), _today()), strict=True)
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(header | values, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return path


def read(name: str) -> dict[str, Any]:
    """The contents of results/NAME.json."""
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


def machine() -> dict[str, Any]:
    """What a measurement ran on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "system": platform.system(),
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "allocator": os.environ.get("GLIBC_TUNABLES", "default"),
    }


def _state() -> tuple[str, bool]:
    """The commit, and whether files that git knows have changed since."""
    changed = _git(
        "status", "--porcelain", "--untracked-files=no", "--", ".", ":!results", ":!*.md"
    )
    return _git("rev-parse", "HEAD"), changed != ""


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True).stdout.strip()


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
