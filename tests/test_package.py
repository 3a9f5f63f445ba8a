"""`import transformer_jax` is fast and has the public names."""

import ast
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import transformer_jax

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", transformer_jax.__all__)
def test_every_public_name_is_found(name: str) -> None:
    assert getattr(transformer_jax, name).__doc__


def test_the_list_of_names_is_that_of_the_imports() -> None:
    tree = ast.parse(Path(transformer_jax.__file__).read_text("utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.With))
    imports = (node for node in block.body if isinstance(node, ast.ImportFrom))
    names = [alias.name for node in imports for alias in node.names]
    assert sorted(transformer_jax.__all__) == sorted([*names, "__version__"])


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
