"""Tests the package where it is installed and nothing else is: `make wheel` runs this.

It imports nothing of the checkout, and works in a folder of its own.
"""

import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

SHORT = ("train.steps=2", "train.best=loss", "train.evaluate-every=2", "data.dev=grammar:test")
"""What shortens the quickstart."""

COMMANDS = (
    ("--help",),
    ("--version",),
    ("train", "--config=quickstart", "--run=run", *(f"--config.{field}" for field in SHORT)),
    ("translate", "--run=run", "--input=text"),
)


def main() -> None:
    """Exits with status 1 if a file is missing or a command fails."""
    package = files("transformer_jax")
    for name in ("decoding/attention_view.html", "py.typed"):
        if not package.joinpath(name).is_file():
            sys.exit(f"the wheel has no {name}")
    if not str(package).startswith(sys.prefix):
        sys.exit(f"the package is not that of the wheel: {package}")
    program = str(Path(sys.executable).with_name("transformer-jax"))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text").write_text("The old teacher buys a new book.\n", "utf-8")
        for command in COMMANDS:
            subprocess.run([program, *command], cwd=folder, check=True)
    print(f"transformer-jax {version('transformer-jax')}: the wheel works")


if __name__ == "__main__":
    main()
