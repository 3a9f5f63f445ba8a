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
from transformer_jax.decoding.back_translation import SAMPLED, require_direction, require_vocabulary
from transformer_jax.errors import UserError
from transformer_jax.parallel.processes import is_coordinator, require_same_everywhere, share_errors
from transformer_jax.text.corpus import Corpus
from transformer_jax.text.files import read_lines
from transformer_jax.text.tokenizer import Tokenizer


def run(options: BackTranslate, arguments: ConfigArguments) -> None:
    """Writes a pair for each line of a text, which the coordinator alone reads."""
    translator = load_translator(options, arguments, n_best=1)
    corpus = Corpus(options.pairs, "train", translator.config.data.fields)
    require_same_everywhere(translator.config, {options.pairs: corpus.digest})
    require_direction(translator, list(itertools.islice(corpus.pairs(), SAMPLED)))
    path = options.output if is_coordinator() else os.devnull
    left_out, written = 0, 0
    with share_errors(), text_output(path) as output, progress(options.text, path) as advance:
        lines = _lines(options.text, translator.tokenizers.source)
        for translation in translator.stream(lines, done=advance):
            if translation and translation.source.strip():
                print(translation, translation.source.replace("\t", " "), sep="\t", file=output)
                written += 1
            else:
                left_out += 1
    if is_coordinator():
        print(
            f"{written:,} pairs; {left_out:,} lines left out: blank, or so translated",
            file=sys.stderr,
        )


def _lines(path: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Yields the lines of a text. UserError: it has none with text, or is of another language."""
    if Path(path).is_file():  # A line that is not UTF-8 is found before hours of translation.
        for _ in read_lines(path):
            pass
    lines, ahead = itertools.tee(read_lines(path))
    texts = list(itertools.islice(filter(str.strip, ahead), SAMPLED))
    del ahead  # for which all lines would be kept
    if not texts:
        raise UserError(f"--text {path}: empty; must hold at least one line of text")
    require_vocabulary(tokenizer, texts)
    yield from lines
