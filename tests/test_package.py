"""`import transformer_jax` is fast and has the public names."""

import subprocess
import sys
from importlib.metadata import version
from inspect import getmembers, ismodule
from pathlib import Path

import pytest

import transformer_jax

ROOT = Path(__file__).parents[1]
PUBLIC = [n for n, x in getmembers(transformer_jax) if not (n.startswith("_") or ismodule(x))]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_found(name: str) -> None:
    assert getattr(transformer_jax, name).__name__ == name


def test_the_version_is_that_of_the_package() -> None:
    assert transformer_jax.__version__ == version("transformer-jax")


WITHOUT_JAX = """
import contextlib, sys
import transformer_jax
from transformer_jax.cli.main import main

transformer_jax.Config, transformer_jax.UserError
for command in ("--help", "train --help", "train --help-config"):
    assert "jax" not in sys.modules
    with contextlib.suppress(SystemExit):
        main(command.split())
assert "jax" not in sys.modules, command
"""


def test_what_does_not_compute_does_not_import_jax() -> None:
    """Importing JAX takes half a second."""
    command = [sys.executable, "-c", WITHOUT_JAX]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
