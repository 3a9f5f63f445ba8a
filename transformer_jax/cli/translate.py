"""The command `translate`."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from typing import Any

from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import Translate
from transformer_jax.cli.common import load_translator, parse_layers, progress, text_output
from transformer_jax.decoding.alignment import align_pieces, pharaoh
from transformer_jax.decoding.translator import WINDOW, Translation, Translator
from transformer_jax.errors import UserError
from transformer_jax.parallel.processes import is_coordinator, share_errors, stream
from transformer_jax.text.files import read_lines
from transformer_jax.text.windows import windows


def run(options: Translate, arguments: ConfigArguments) -> None:
    """Translates a file or standard input, which the coordinator alone reads and writes."""
    attended = parse_layers("--align", options.align) if options.align else None
    if attended is not None and not options.json:
        raise UserError("--align: needs --json; plain output has a line for each")
    translator = load_translator(options, arguments, attended, beam=options.beam)
    n_best = translator.config.decode.n_best
    if n_best > 1 and not options.json:
        raise UserError(f"decode.n_best={n_best}: needs --json; plain output has a line for each")
    path = options.output if is_coordinator() else os.devnull
    number = 1
    with (
        share_errors(),
        text_output(path) as output,
        progress(options.input, options.output) as advance,
    ):
        for lines, *given in stream(_windows(options)):
            translations = translator.translate(lines, *given, first=number, done=advance)
            for line, translation in zip(lines, translations, strict=True):
                text = translation.text
                if options.json:
                    record = {"line": number} | _record(translator, line, translation)
                    text = json.dumps(record, ensure_ascii=False)
                print(text, file=output)
                number += 1
            output.flush()


def _windows(options: Translate) -> Iterator[tuple[Any, ...]]:
    """Yields lines, how their translations begin, and which phrases these hold."""
    files = (options.prefix, options.phrases)
    prefixes, phrases = (None if path is None else read_lines(path) for path in files)
    for lines in windows(read_lines(options.input), WINDOW):
        begins = None if prefixes is None else list(itertools.islice(prefixes, len(lines)))
        holds = None if phrases is None else itertools.islice(phrases, len(lines))
        yield lines, begins, None if holds is None else [text.split("\t") for text in holds]
    for path, left in zip(files, (prefixes, phrases), strict=True):
        if left is not None and next(left, None) is not None:
            raise UserError(f"{path}: has more lines than the input; must have one for each")


def _record(translator: Translator, line: str, translation: Translation) -> dict[str, Any]:
    """Returns the JSON object of a line: its best hypothesis, and all if more are asked for."""
    hypotheses: list[dict[str, Any]] = []
    for hypothesis in translation.hypotheses:
        tokens = translator.tokenizers.target.pieces(hypothesis.ids)
        record = {
            "text": hypothesis.text,
            "score": hypothesis.score,
            "log_prob": hypothesis.log_prob,
            "tokens": tokens,
        }
        if hypothesis.attention is not None:
            source = translator.tokenizers.source.pieces(translator.encode(line))
            for name, words in (("alignment", True), ("token_alignment", False)):
                found = align_pieces(hypothesis.attention, source, tokens, words=words)
                record[name] = pharaoh(found)
        hypotheses.append(record)
    more = {"n_best": hypotheses} if translator.config.decode.n_best > 1 else {}
    return hypotheses[0] | more
