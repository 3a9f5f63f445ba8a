"""The commands `translate`, `back-translate`, `score` and `align`: a model reads lines of text."""

import itertools
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import Align, BackTranslate, PairOptions, Score, Translate
from transformer_jax.cli.common import load_translator, parse_layers, progress, text_output
from transformer_jax.config import Config
from transformer_jax.decoding.alignment import align_pieces, pharaoh
from transformer_jax.decoding.scoring import SAMPLED, Scorer, require_direction, require_vocabulary
from transformer_jax.decoding.translator import WINDOW, Translation, Translator
from transformer_jax.errors import UserError
from transformer_jax.parallel.processes import is_coordinator, require_same_everywhere, share_errors
from transformer_jax.text.corpus import Corpus
from transformer_jax.text.files import read_lines
from transformer_jax.text.tokenizer import Tokenizer


def translate(options: Translate, arguments: ConfigArguments) -> None:
    """Translates a file or standard input, which the coordinator alone reads and writes."""
    heads = parse_layers("--align", options.align) if options.align else None
    if heads is not None and not options.json:
        raise UserError("--align: needs --json; plain output has a line for each")
    _require_apart([options.input, options.prefix, options.phrases])
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


def _require_apart(names: Sequence[str | None]) -> None:
    """UserError: two inputs are the same pipe, of which each would get some of the lines."""
    pipes = [name for name in names if name and not Path(name).is_file()]
    for name, count in Counter(name.replace("/dev/stdin", "-") for name in pipes).items():
        if count > 1:
            raise UserError(f"{name}: is read once, but named {count} times; write it to a file")


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


def back_translate(options: BackTranslate, arguments: ConfigArguments) -> None:
    """Writes a pair for each line of a text, which the coordinator alone reads."""
    translator = load_translator(options, arguments, n_best=1)
    corpus = Corpus(options.pairs, "train", translator.config.data.fields)
    require_same_everywhere(translator.config, {options.pairs: corpus.digest})
    require_direction(translator, list(itertools.islice(corpus.pairs(), SAMPLED)))
    path = options.output if is_coordinator() else os.devnull
    left_out, written = 0, 0
    with share_errors(), text_output(path) as output, progress(options.text, path) as advance:
        lines = _source_lines(options.text, translator.tokenizers.source)
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


def _source_lines(path: str, tokenizer: Tokenizer) -> Iterator[str]:
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


def score(options: Score, arguments: ConfigArguments) -> None:
    """Prints a line for each pair, and on standard error the perplexity of all."""
    translator = load_translator(options, arguments)
    scorer, pieces = Scorer.like(translator), translator.tokenizers.target.pieces
    total, tokens = 0.0, 0
    for first, sources, targets in _windows(options, translator.config):
        for number, pair in enumerate(scorer(sources, targets, first), first):
            total, tokens = total + pair.log_prob, tokens + len(pair.ids)
            line = f"{pair.log_prob:.6f}"
            if options.json:
                record = {"line": number, "log_prob": pair.log_prob}
                each = {"tokens": pieces(pair.ids), "log_probs": pair.log_probs}
                line = json.dumps(record | each, ensure_ascii=False)
            if is_coordinator():
                print(line)
    if is_coordinator():
        perplexity = math.exp(min(-total / max(tokens, 1), 700.0))
        print(f"{tokens:,} tokens: perplexity {perplexity:.4f}", file=sys.stderr)


def align(options: Align, arguments: ConfigArguments) -> None:
    """Prints the alignment of each pair; that of blank lines is blank."""
    translator = load_translator(options, arguments)
    scorer = Scorer.like(translator, parse_layers("--layer", options.layer))
    of_source, of_target = (side.pieces for side in translator.tokenizers)
    for first, sources, targets in _windows(options, translator.config):
        for number, pair in enumerate(scorer(sources, targets, first), first):
            pieces = of_source(translator.encode(sources[number - first])), of_target(pair.ids)
            assert pair.attention is not None
            alignment = align_pieces(pair.attention, *pieces, words=not options.pieces)
            if is_coordinator():
                print(pharaoh(alignment))


def _windows(
    options: PairOptions, config: Config
) -> Iterator[tuple[int, tuple[str, ...], tuple[str, ...]]]:
    """Yields the pairs of corpora in windows: the number of the first line, sources, targets."""
    for name in options.data or config.data.dev:
        corpus = Corpus(name, "validation", config.data.fields)
        require_same_everywhere(config, {name: corpus.digest})
        pairs, first = iter(corpus.pairs()), 1
        while window := list(itertools.islice(pairs, WINDOW)):
            sources, targets = zip(*window, strict=True)
            yield first, sources, targets
            first += len(window)
