"""The command `back-translate`."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import BackTranslate
from transformer_jax.cli.common import load_translator, progress, text_output
from transformer_jax.decoding.back_translation import (
    SAMPLED,
    back_translate,
    require_direction,
    require_vocabulary,
)
from transformer_jax.decoding.translator import WINDOW
from transformer_jax.errors import UserError
from transformer_jax.parallel.processes import (
    is_coordinator,
    require_same_everywhere,
    share_errors,
    stream,
)
from transformer_jax.text.corpus import Corpus
from transformer_jax.text.files import read_lines
from transformer_jax.text.tokenizer import Tokenizer
from transformer_jax.text.windows import windows


def run(options: BackTranslate, arguments: ConfigArguments) -> None:
    """Writes a pair for each line of a text, which the coordinator alone reads."""
    translator = load_translator(options, arguments, n_best=1)
    corpus = Corpus(options.pairs, "train", translator.config.data.fields)
    require_same_everywhere(translator.config, {options.pairs: corpus.digest})
    require_direction(translator, list(itertools.islice(corpus.pairs(), SAMPLED)))
    path = options.output if is_coordinator() else os.devnull
    number, written = 1, 0
    with share_errors(), text_output(path) as output, progress(options.text, path) as advance:
        for lines in stream(_windows(options.text, translator.tokenizers.source)):
            for source, target in back_translate(translator, lines, first=number, done=advance):
                print(source, target, sep="\t", file=output)
                written += 1
            number += len(lines)
    if is_coordinator():
        left_out = number - 1 - written
        print(
            f"{written:,} pairs; {left_out:,} lines left out: blank, or so translated",
            file=sys.stderr,
        )


def _windows(path: str, tokenizer: Tokenizer) -> Iterator[list[str]]:
    """Yields the lines of a text. UserError: it has none with text, or is of another language."""
    if Path(path).is_file():  # A line that is not UTF-8 is found before hours of translation.
        for _ in read_lines(path):
            pass
    empty = True
    for lines in windows(read_lines(path), WINDOW):
        texts = [line for line in lines if line.strip()]
        if empty and texts:
            require_vocabulary(tokenizer, texts)
        empty = empty and not texts
        yield lines
    if empty:
        raise UserError(f"--text {path}: empty; must hold at least one line of text")
