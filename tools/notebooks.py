"""Executes notebooks from a clean kernel, and writes them with outputs to build/notebooks/."""

import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXECUTED = Path("build/notebooks")

LIMIT = 240
"""CPU seconds of a notebook at most: two minutes of two cores. On a busy machine it is more."""


def execute(path: Path, folder: Path) -> float:
    """Executes a notebook in its own folder and writes it to `folder`. Returns its CPU seconds."""
    begun, before = time.perf_counter(), _cpu_seconds()
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=resources).execute()
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, folder / path.name)
    used = _cpu_seconds() - before
    print(f"{path.name}: {time.perf_counter() - begun:.0f} s, {used:.0f} s of CPU time", flush=True)
    return used


def _cpu_seconds() -> float:
    """Returns the CPU time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: Sequence[str]) -> None:
    """Executes the notebooks that are named."""
    slow = [name for name in arguments if execute(Path(name), EXECUTED) > LIMIT]
    if slow:
        sys.exit(f"more than {LIMIT} s of CPU time: {', '.join(slow)}")


if __name__ == "__main__":
    main(sys.argv[1:])
