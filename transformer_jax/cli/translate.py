"""The command `translate`."""

from __future__ import annotations

import json
import os
from typing import Any

from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import Translate
from transformer_jax.cli.common import load_translator, parse_layers, progress, text_output
from transformer_jax.decoding.alignment import align_pieces, pharaoh
from transformer_jax.decoding.translator import Translation, Translator
from transformer_jax.errors import UserError
from transformer_jax.parallel.processes import is_coordinator, share_errors
from transformer_jax.text.files import read_lines


def run(options: Translate, arguments: ConfigArguments) -> None:
    """Translates a file or standard input, which the coordinator alone reads and writes."""
    heads = parse_layers("--align", options.align) if options.align else None
    if heads is not None and not options.json:
        raise UserError("--align: needs --json; plain output has a line for each")
    translator = load_translator(options, arguments, heads, beam=options.beam)
    n_best = translator.config.decode.n_best
    if n_best > 1 and not options.json:
        raise UserError(f"decode.n_best={n_best}: needs --json; plain output has a line for each")
    prefixes = None if options.prefix is None else read_lines(options.prefix)
    phrases = None
    if options.phrases is not None:
        phrases = (text.split("\t") for text in read_lines(options.phrases))
    path = options.output if is_coordinator() else os.devnull
    with (
        share_errors(),
        text_output(path) as output,
        progress(options.input, options.output) as advance,
    ):
        lines = translator.stream(read_lines(options.input), prefixes, phrases, done=advance)
        for number, translation in enumerate(lines, 1):
            text = translation.text
            if options.json:
                record = {"line": number} | _record(translator, translation)
                text = json.dumps(record, ensure_ascii=False)
            print(text, file=output, flush=True)
        for name, left in ((options.prefix, prefixes), (options.phrases, phrases)):
            if is_coordinator() and left is not None and next(left, None) is not None:
                raise UserError(f"{name}: has more lines than the input; must have one for each")


def _record(translator: Translator, translation: Translation) -> dict[str, Any]:
    """Returns the JSON object of a line: its best hypothesis, and all if more are asked for."""
    source = translator.tokenizers.source.pieces(translator.encode(translation.source))
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
            for name, words in (("alignment", True), ("token_alignment", False)):
                alignment = align_pieces(hypothesis.attention, source, tokens, words=words)
                record[name] = pharaoh(alignment)
        hypotheses.append(record)
    more = {"n_best": hypotheses} if translator.config.decode.n_best > 1 else {}
    return hypotheses[0] | more
