"""Writes and reads result files: JSON with a header that says how, where and with what code."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax

from transformer_jax.files import write_whole
from transformer_jax.runs import run

FOLDER = Path("results")

HEADER = ("command", "commit", "dirty", "machine", "versions", "date")
"""The keys that every result file begins with."""


def write(name: str, command: str, values: dict[str, Any], folder: Path = FOLDER) -> Path:
    """Writes results/NAME.json, the header before `values`, and returns its path.

    `command` is the one that makes the file again.
    """
    found = {"command": command, "versions": run.versions()} | origin()
    header = {key: found[key] for key in HEADER}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    with write_whole(path) as file:
        file.write(json.dumps(header | values, indent=1, ensure_ascii=False) + "\n")
    return path


def origin() -> dict[str, Any]:
    """Returns with what code, where and when a part of a result file is measured."""
    commit, dirty = _code_version()
    return {"commit": commit, "dirty": dirty, "machine": machine(), "date": _today()}


def read(name: str) -> dict[str, Any]:
    """Returns the contents of results/NAME.json."""
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


def machine() -> dict[str, Any]:
    """Returns the machine that a measurement runs on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "system": platform.system(),
        "processor": models[0] if models else platform.processor(),
        "cores": _cores(),
        "accelerators": [d.device_kind for d in jax.devices() if d.platform != "cpu"],
        "allocator": os.environ.get("GLIBC_TUNABLES", "default"),
    }


def _cores() -> int | None:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _code_version() -> tuple[str, bool]:
    """Returns the commit, and whether tracked files have changed since; "" outside a repository."""
    changed = _git(
        "status", "--porcelain", "--untracked-files=no", "--", ".", ":!results", ":!*.md"
    )
    return _git("rev-parse", "HEAD"), changed != ""


def _git(*arguments: str) -> str:
    if shutil.which("git") is None:
        return ""
    return subprocess.run(["git", *arguments], capture_output=True, text=True).stdout.strip()


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
