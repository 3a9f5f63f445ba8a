"""Writes and reads result files: JSON with a header that says how, where and with what code."""

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
    header = {"command": command, "versions": run.versions()} | origin()
    contents = {key: header[key] for key in HEADER} | values
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    write_whole(path, json.dumps(contents, indent=1, ensure_ascii=False) + "\n")
    return path


def origin() -> dict[str, Any]:
    """Returns with what code, where and when a part of a result file is measured.

    commit is "" outside a repository. dirty: tracked files have changed since the commit.
    """
    unchecked = ("--", ".", ":!results", ":!models", ":!*.md")
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": _git("status", "--porcelain", "--untracked-files=no", *unchecked) != "",
        "machine": machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def read(name: str) -> dict[str, Any]:
    """Returns the contents of results/NAME.json."""
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


def machine() -> dict[str, Any]:
    """Returns the machine that a measurement runs on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    on_linux = hasattr(os, "sched_getaffinity")
    return {
        "system": platform.system(),
        "processor": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if on_linux else os.cpu_count(),
        "accelerators": [d.device_kind for d in jax.devices() if d.platform != "cpu"],
        "allocator": os.environ.get("GLIBC_TUNABLES", "default"),
    }


def _git(*arguments: str) -> str:
    if shutil.which("git") is None:
        return ""
    return subprocess.run(["git", *arguments], capture_output=True, text=True).stdout.strip()
