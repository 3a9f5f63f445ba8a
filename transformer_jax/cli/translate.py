"""The command `translate`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import IO

from transformer_jax.cli.commands import Translate
from transformer_jax.cli.common import load_translator
from transformer_jax.decoding.translator import WINDOW
from transformer_jax.files import local_path, write_whole
from transformer_jax.parallel.processes import broadcast, is_coordinator, share_errors, stream
from transformer_jax.text.files import read_lines


def run(options: Translate) -> None:
    """Translates a file or standard input, which the coordinator alone reads and writes."""
    translator = load_translator(options)
    interactive = broadcast(options.input == "-" and sys.stdin.isatty())
    window = 1 if interactive else WINDOW
    path = options.output if is_coordinator() else os.devnull
    with share_errors(), _output(path) as output:
        lines = stream(read_lines(options.input), window)
        for translation in translator.stream(lines, window=window):
            print(translation.text, file=output, flush=interactive)


@contextlib.contextmanager
def _output(path: str) -> Iterator[IO[str]]:
    """Opens standard output ("-"), a device, or a file that is written whole or not at all."""
    if path == "-":
        yield sys.stdout
        sys.stdout.flush()
        return
    file = local_path(path, "--output")
    if file.exists() and not file.is_file():
        with file.open("w", encoding="utf-8") as output:
            yield output
    else:
        with write_whole(file) as output:
            yield output
