"""Writes the pages of the site's reference: each package with its modules, and each command.

Sphinx then fills them with the docstrings. No list of modules is kept by hand.
"""

import contextlib
import inspect
import io
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import transformer_jax
from transformer_jax.cli.commands import COMMANDS
from transformer_jax.cli.main import main as command_line

NAME = transformer_jax.__name__
PACKAGE = Path(transformer_jax.__path__[0])


def full_name(text: str) -> str | None:
    """Returns the full name of what `text` names, such as decoding.beam.beam_search; None: nothing.

    Full names need not exist: the site's build reports those that do not.
    """
    if re.fullmatch(rf"{NAME}(\.\w+)+", text):
        return text
    module, _, name = text.rpartition(".")
    path = PACKAGE / f"{module.replace('.', '/')}.py"
    if not re.fullmatch(r"(\w+\.)+\w+", text) or not path.is_file():
        return None
    value = getattr(import_module(f"{NAME}.{module}"), name, None)
    # A module that another one imports is not a name of it: `config.json` is a file.
    return None if value is None or inspect.ismodule(value) else f"{NAME}.{text}"


def pages() -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each page."""
    every = [found.name for found in pkgutil.walk_packages(transformer_jax.__path__, f"{NAME}.")]
    modules = [name for name in every if ".snippets." not in name]  # which are programs
    packages = sorted({module.split(".")[1] for module in modules} - {"cli"})
    yield "index", _index(packages)
    yield "commands", _commands()
    for package in packages:
        own = f"{NAME}.{package}"
        text = _heading(own, "=") + _automodule(own)
        for module in modules:
            if module.startswith(f"{own}."):
                text += _heading(module.removeprefix(f"{own}."), "-") + _automodule(module)
        yield package, text


def _index(packages: list[str]) -> str:
    members = inspect.getmembers(transformer_jax, lambda x: not inspect.ismodule(x))
    names = {name: value.__module__ for name, value in members if not name.startswith("_")}
    public = "\n".join(f"- :any:`{name} <{module}.{name}>`" for name, module in names.items())
    tree = "\n".join(f"   {page}" for page in ("commands", *packages))
    return (
        f"{_heading('Reference', '=')}Made from the code. These names can be imported from "
        f"``{NAME}``; the others from their modules.\n\n{public}\n\n"
        f".. toctree::\n   :maxdepth: 1\n\n{tree}\n"
    )


def _commands() -> str:
    """Returns the page with the help of every command."""
    text = _heading("Commands", "=")
    for name in COMMANDS:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            command_line([*name.split(), "--help"])
        lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue()).splitlines()
        body = "\n".join(f"   {line.rstrip()}" for line in lines)
        text += _heading(f"transformer-jax {name}", "-") + f".. code-block:: text\n\n{body}\n\n"
    return text


def _heading(title: str, line: str) -> str:
    return f"{title}\n{line * len(title)}\n\n"


def _automodule(name: str) -> str:
    return f".. automodule:: {name}\n   :members:\n   :ignore-module-all:\n\n"


def paragraph(text: str) -> str:
    """Returns a paragraph of Markdown as reStructuredText: words, code in backticks, or a block."""
    text = text.rstrip()
    if all(line.startswith("    ") for line in text.splitlines()):
        return f"::\n\n{text}"
    parts = re.split("`([^`]+)`", text)
    parts[::2] = [re.sub(r"([\\*|_])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [rf"``{code}``\ " for code in parts[1::2]]
    return "".join(parts)


def write(folder: Path) -> None:
    """Writes the pages that have changed."""
    folder.mkdir(exist_ok=True)
    for name, text in pages():
        path = folder / f"{name}.rst"
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
