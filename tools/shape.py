"""Prints the size of the code and the length of the way through it: `make shape`.

The size is in lines without blanks, comments and docstrings. The way is the calls of the package
that are on the stack when the first attention scores of a training step are traced, and when a beam
search first takes the top k.
"""

import ast
import io
import logging
import sys
import tempfile
import threading
import tokenize
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp

import transformer_jax
from transformer_jax import Config, Translator, load_config_file, train

ROOT = Path(__file__).parents[1]
PACKAGE = Path(transformer_jax.__file__).parent


def code_lines(text: str) -> int:
    """Returns the number of lines of Python code, without blanks, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        # Tokens of layout, such as the indentation, are whitespace.
        if token.string.strip() and token.type != tokenize.COMMENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def sizes() -> Iterator[tuple[str, int]]:
    """Yields the lines of code of the package, of its parts, of the tools and of the tests."""
    for top in (PACKAGE, ROOT / "tools", ROOT / "tests"):
        counts: dict[str, int] = {}
        for path in sorted(top.rglob("*.py")):
            inner = path.relative_to(top).parts
            part = inner[0] if len(inner) > 1 and top == PACKAGE else "modules at the top"
            counts[part] = counts.get(part, 0) + code_lines(path.read_text("utf-8"))
        yield top.name, sum(counts.values())
        if top == PACKAGE:
            yield from ((f"  {part}", count) for part, count in sorted(counts.items()))


Stack = list[str]
"""The calls of functions of the package as FILE:FUNCTION, the outermost first."""


def _calls(frame: FrameType | None) -> Stack:
    """Returns the calls of the package from the outermost to `frame`, without comprehensions."""
    calls: Stack = []
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if path.is_relative_to(PACKAGE) and not name.endswith(("comp>", "<genexpr>")):
            calls.append(f"{path.relative_to(PACKAGE)}:{name.replace('.<locals>', '')}")
        frame = frame.f_back
    return calls[::-1]


@contextmanager
def _recorded(module: Any, name: str, wanted: Callable[[Stack], bool]) -> Iterator[list[Stack]]:
    """Records the stacks with which `module.name` is called, those that are `wanted`.

    The stack of a thread is preceded by what the thread that entered the context is in meanwhile.
    """
    function, stacks, main = getattr(module, name), [], threading.get_ident()

    def record(*arguments: Any, **options: Any) -> Any:
        stack = _calls(sys._getframe(1))
        if threading.get_ident() != main:
            stack = _calls(sys._current_frames()[main]) + stack
        if wanted(stack):
            stacks.append(stack)
        return function(*arguments, **options)

    with patch.object(module, name, record):
        yield stacks


def _tiny(folder: Path) -> Config:
    """Returns the quickstart, cut to two steps of a small model on a small corpus."""
    text = {"train": ("grammar:test",), "dev": (), "shapes": 1, "cache": str(folder / "cache")}
    return load_config_file("quickstart").changed(
        model={"d_model": 16, "d_ff": 32},
        tokenizer={"vocabulary": 500},
        data=text,
        train={"steps": 2, "evaluate_every": 2, "save_every": 2},
        decode={"beam": 2},
    )


def ways() -> dict[str, Stack]:
    """Trains and translates. Returns the calls of each way by its name: "train", from `train` to
    the scores; "model", the part from the model's `__call__` on; "translate", to the top k."""

    def of_step(stack: Stack) -> bool:
        in_step = "training/step.py:summed_gradients" in stack
        return in_step and stack[-1] == "attention/reference.py:reference"

    with tempfile.TemporaryDirectory() as folder:
        with _recorded(jnp, "matmul", of_step) as scores:
            run = train(_tiny(Path(folder)), Path(folder) / "run")
        translator = Translator.load(run.folder)
        with _recorded(jax.lax, "top_k", lambda _: True) as chosen:
            translator.translate(["The old book.", "The book."])
    begin_at = {
        "train": (scores[0], "training/trainer.py:train"),
        "model": (scores[0], "models/transformer.py:Transformer.__call__"),
        "translate": (chosen[0], "decoding/translator.py:Translator.translate"),
    }
    return {name: stack[stack.index(first) :] for name, (stack, first) in begin_at.items()}


def main() -> None:
    """Prints the lines of code, and each way with its calls."""
    for name, count in sizes():
        print(f"{count:>7,}  {name}")
    logging.disable()
    for name, stack in ways().items():
        files = {call.partition(":")[0] for call in stack}
        print(f"\n{name}: {len(stack)} frames in {len(files)} files", *stack, sep="\n  ")


if __name__ == "__main__":
    main()
