"""Executes notebooks from a clean kernel, and writes them with outputs to build/notebooks/."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXECUTED = Path("build/notebooks")


def execute(path: Path, folder: Path) -> None:
    """Executes a notebook in its own folder and writes it to `folder`."""
    began = time.perf_counter()
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=resources).execute()
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, folder / path.name)
    print(f"{path.name}: {time.perf_counter() - began:.0f} s", flush=True)


def main(arguments: Sequence[str]) -> None:
    """Executes the notebooks that are named."""
    for name in arguments:
        execute(Path(name), EXECUTED)


if __name__ == "__main__":
    main(sys.argv[1:])
