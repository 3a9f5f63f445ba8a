"""The commands `translate`, `back-translate`, `score` and `align`: a model reads lines of text."""

import contextlib
import itertools
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import Align, BackTranslate, PairOptions, Score, Translate
from transformer_jax.cli.common import (
    Write,
    corpora_of,
    load_translator,
    parse_layers,
    progress,
    text_output,
    warn_cut,
)
from transformer_jax.config import Config, to_json
from transformer_jax.decoding import scoring
from transformer_jax.decoding.alignment import align_pieces, pharaoh
from transformer_jax.decoding.translator import WINDOW, Translation, Translator
from transformer_jax.errors import UserError, printable
from transformer_jax.files import find_path
from transformer_jax.interop.shortlist import Shortlist
from transformer_jax.parallel import processes
from transformer_jax.runs import checkpoint, run
from transformer_jax.text.corpus import Corpus
from transformer_jax.text.files import make_rereadable, read_lines, text_digest
from transformer_jax.text.tokenizer import Tokenizer


def translate(options: Translate, arguments: ConfigArguments) -> None:
    """Translates a file or standard input, which the coordinator alone reads and writes."""
    heads = parse_layers("--align", options.align) if options.align else None
    if heads is not None and not options.json:
        raise UserError("--align: needs --json; plain output has a line for each")
    inputs = options.input, options.prefix, options.phrases
    _require_apart(inputs)
    changes = {"beam": options.beam, "truncate": options.truncate or None}
    translator = load_translator(options, arguments, heads, **changes)
    shortlist = None
    if options.shortlist is not None:
        shortlist = Shortlist(options.shortlist, translator.tokenizers)
        stored, _ = run.read_config(find_path(options.run[0]) / "config.json")
        _require_same_origin(stored.get("provenance", {}), shortlist, options.shortlist)
        translator = translator.with_shortlist(shortlist)
    n_best = translator.config.decode.n_best
    if n_best > 1 and not options.json:
        raise UserError(f"decode.n_best={n_best}: needs --json; plain output has a line for each")
    files = [name for name in inputs if name is not None]
    form = options.json, options.align, shortlist and shortlist.digests
    truncated: list[bool] = []
    with _writing(options, translator, files, files, form) as (write, count, advance):
        texts, prefixes, phrases = (
            None if name is None else itertools.islice(read_lines(name), count, None)
            for name in inputs
        )
        phrases = None if phrases is None else (text.split("\t") for text in phrases)
        lines = translator.stream(texts or (), prefixes, phrases, first=count + 1, done=advance)
        for number, translation in enumerate(lines, count + 1):
            text = translation.text
            truncated.append(translation.truncated)
            if options.json:
                record = {"line": number} | _record(translator, translation)
                text = json.dumps(record, ensure_ascii=False)
            write(text)
        for name, left in ((options.prefix, prefixes), (options.phrases, phrases)):
            if processes.is_coordinator() and left is not None and next(left, None) is not None:
                raise UserError(f"{name}: has more lines than the input; must have one for each")
    warn_cut(truncated if processes.is_coordinator() else [], options.input)


@contextlib.contextmanager
def _writing(
    options: Translate | BackTranslate,
    translator: Translator,
    files: Sequence[str],
    inputs: Sequence[str],
    form: Any = None,
) -> Iterator[tuple[Write, int, Callable[[int], None]]]:
    """Opens `--output`, which the coordinator alone writes, and shows how far it is.

    The output depends on the config, the parameters, the text in `files`, the first of which has a
    line for each translation, and on its form. It must be none of `inputs`. Yields as `text_output`
    and `progress`.
    """

    def depends_on() -> Any:
        for name in files:
            make_rereadable(name)
        weights = [
            checkpoint.digest(run.load(folder).checkpoints, step, "weights")
            for folder, step in zip(options.run, translator.steps, strict=True)
        ]
        texts = [text_digest(name) for name in files]
        return to_json(translator.config), weights, texts, form

    path = options.output if processes.is_coordinator() else os.devnull
    with (
        processes.share_errors(),
        text_output(path, depends_on, inputs) as (write, count),
        progress(files[0], options.output) as advance,
    ):
        count = processes.broadcast(count)
        advance(count)
        yield write, count, advance


def _require_same_origin(provenance: dict[str, Any], shortlist: Shortlist, name: str) -> None:
    """UserError: an imported model came with other shortlists."""
    digests = provenance.get("imported_from", {}).get("sha256", {}).items()
    own = {digest for file, digest in digests if file.startswith("lex")}
    if own and own.isdisjoint(shortlist.digests.values()):
        raise UserError(
            f"--shortlist={name}: is none of those beside which the model was imported; name one, "
            "or import the model again beside this one"
        )


def _require_apart(names: Sequence[str | None]) -> None:
    """UserError: two inputs are the same pipe, of which each would get some of the lines."""
    pipes = [name for name in names if name and not Path(name).is_file()]
    for name, count in Counter(name.replace("/dev/stdin", "-") for name in pipes).items():
        if count > 1:
            raise UserError(f"{name}: is read once, but named {count} times; write it to a file")


def _record(translator: Translator, translation: Translation) -> dict[str, Any]:
    """Returns the JSON object of a line: its best hypothesis, and all if more are asked for.

    That of a line that is translated in parts has those of the parts, too.
    """
    source = translator.tokenizers.source.pieces(translator.encode(translation.source))
    hypotheses: list[dict[str, Any]] = []
    for each in translation.hypotheses:
        tokens = translator.tokenizers.target.pieces(each.ids)
        record: dict[str, Any] = {"text": each.text, "score": each.score, "log_prob": each.log_prob}
        record["tokens"] = tokens
        if each.attention is not None:
            for name, words in (("alignment", True), ("token_alignment", False)):
                record[name] = pharaoh(align_pieces(each.attention, source, tokens, words=words))
        hypotheses.append(record)
    more = {"n_best": hypotheses} if translator.config.decode.n_best > 1 else {}
    parts = [{"source": p.source.strip()} | _record(translator, p) for p in translation.parts]
    return hypotheses[0] | more | ({"parts": parts} if parts else {})


def back_translate(options: BackTranslate, arguments: ConfigArguments) -> None:
    """Writes a pair for each line of a text, which the coordinator alone reads."""
    if arguments.sets("decode.n_best"):
        raise UserError("decode.n_best: leave it out; back-translate writes one pair for each line")
    translator = load_translator(options, arguments, n_best=1)
    corpus = Corpus(options.pairs, "train", translator.config.data.fields)
    processes.require_same_everywhere(translator.config, {options.pairs: corpus.digest})
    scoring.require_direction(translator, list(itertools.islice(corpus.pairs(), scoring.SAMPLED)))
    with processes.share_errors():
        if processes.is_coordinator():
            _require_text(options.text, translator.tokenizers.source)
    inputs = [options.text, *(path for path, _ in corpus.file_digests)]
    truncated: list[bool] = []
    left_out, written = 0, 0
    with _writing(options, translator, [options.text], inputs) as (write, count, advance):
        lines = itertools.islice(read_lines(options.text), count, None)
        for translation in translator.stream(lines, first=count + 1, done=advance):
            truncated.append(translation.truncated)
            source = translation.source.replace("\t", " ")
            if translation and source.strip():
                write(f"{translation}\t{source}")
                written += 1
            else:
                write(None)
                left_out += 1
    if processes.is_coordinator():
        pairs = f"{written:,} {'further ' * (count > 0)}pairs"
        print(f"{pairs}; {left_out:,} lines left out: blank, or so translated", file=sys.stderr)
        warn_cut(truncated, options.text)


def _require_text(path: str, tokenizer: Tokenizer) -> None:
    """UserError: a text cannot be read, has no line with text, or is of another language."""
    make_rereadable(path)
    texts = filter(str.strip, read_lines(path))
    sample = list(itertools.islice(texts, scoring.SAMPLED))
    if not sample:
        raise UserError(f"--text {path}: empty; must hold at least one line of text")
    scoring.require_vocabulary(tokenizer, sample)
    for _ in texts:  # A line that is not UTF-8 is found before hours of translation.
        pass


def score(options: Score, arguments: ConfigArguments) -> None:
    """Prints a line for each pair, and on standard error the perplexity of all."""
    translator = load_translator(options, arguments)
    pieces = translator.tokenizers.target.pieces
    total, tokens = 0.0, 0
    for number, _, pair in _scores(options, translator.config, scoring.Scorer(translator)):
        line = f"nan\t{pair.reason}" if pair.reason else f"{pair.log_prob:.6f}"
        if options.json:
            each = {"tokens": pieces(pair.ids), "log_probs": pair.log_probs}
            more = {"log_prob": None, "reason": pair.reason} if pair.reason else each
            record = {"line": number, "log_prob": pair.log_prob} | more
            line = json.dumps(record, ensure_ascii=False)
        if not pair.reason:
            total, tokens = total + pair.log_prob, tokens + len(pair.ids)
        if processes.is_coordinator():
            print(line, flush=True)
    if processes.is_coordinator():
        perplexity = math.exp(min(-total / max(tokens, 1), 700.0))
        print(f"{tokens:,} tokens: perplexity {perplexity:.4f}", file=sys.stderr)


def align(options: Align, arguments: ConfigArguments) -> None:
    """Prints the alignment of each pair; that of blank lines, or of too long ones, is blank."""
    translator = load_translator(options, arguments)
    scorer = scoring.Scorer(translator, parse_layers("--layer", options.layer))
    of_source, of_target = (side.pieces for side in translator.tokenizers)
    for _, source, pair in _scores(options, translator.config, scorer):
        pieces = of_source(translator.encode(source)), of_target(pair.ids)
        assert pair.attention is not None
        alignment = align_pieces(pair.attention, *pieces, words=not options.pieces)
        if processes.is_coordinator():
            print(pharaoh(alignment), flush=True)


def _scores(
    options: PairOptions, config: Config, scorer: scoring.Scorer
) -> Iterator[tuple[int, str, scoring.PairScore]]:
    """Yields the number of each line of the corpora, its source and its score. In the end, prints
    on standard error how many have none."""
    left_out: list[str] = []
    for name in corpora_of(options, config):
        corpus = Corpus(name, "validation", config.data.fields)
        processes.require_same_everywhere(config, {name: corpus.digest})
        pairs, numbers = iter(corpus.pairs()), itertools.count(1)
        while window := list(itertools.islice(pairs, WINDOW)):
            sources, targets = zip(*window, strict=True)
            for source, pair in zip(sources, scorer(sources, targets), strict=True):
                number = next(numbers)
                if pair.reason:
                    left_out.append(f"{name}, line {number}: {pair.reason}")
                yield number, source, pair
    if left_out and processes.is_coordinator():
        message = f"{len(left_out):,} pairs left out; the first: {left_out[0]}"
        print(printable(message), file=sys.stderr)
