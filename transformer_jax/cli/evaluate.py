"""The command `evaluate`."""

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import Evaluate
from transformer_jax.cli.common import corpora_of, load_translator, output_file, progress, warn_cut
from transformer_jax.config import Config, DecodeConfig
from transformer_jax.decoding.evaluation import compare, line_scores, require_language
from transformer_jax.decoding.translator import Translation, Translator
from transformer_jax.errors import UserError, printable
from transformer_jax.files import write_whole
from transformer_jax.parallel.processes import is_coordinator
from transformer_jax.text.corpus import Corpus
from transformer_jax.text.files import read_lines
from transformer_jax.training.validation import Evaluation, evaluate

COLUMNS = ("bleu", "chrf", "length_ratio", "sentences_per_s")
"""Scores in the table of several searches."""


def run(options: Evaluate, arguments: ConfigArguments) -> None:
    """Prints the scores of each corpus, and some translations."""
    for name in ("show", "worst"):
        if (count := getattr(options, name)) < 0:
            raise UserError(f"--{name}={count}: must be at least 0")
    if options.language is not None:
        require_language(options.language)
    beams, alphas = _numbers("--beam", options.beam, int), _numbers("--alpha", options.alpha, float)
    translator = load_translator(options, arguments)
    corpora = corpora_of(options, translator.config)
    read = partial(_read_beside, corpora, translator.config)
    baseline = None if options.baseline is None else read("--baseline", options.baseline)
    others = [read("--references", path) for path in options.references]
    decode = translator.config.decode
    pairs = itertools.product(beams or [decode.beam], alphas or [decode.alpha])
    n_best = decode.n_best if decode.sample else 1
    searches = [replace(decode, beam=beam, alpha=alpha, n_best=n_best) for beam, alpha in pairs]
    for result in _evaluations(options, translator, corpora, searches, others):
        if not is_coordinator():
            continue
        is_first = result.search == searches[0]
        report = result.dev.examples.report
        if report.left_out and is_first:
            message = f"{result.corpus}: loss without some pairs: {report}"
            print(printable(message), file=sys.stderr)
        truncated = [isinstance(each, Translation) and each.truncated for each in result.outputs]
        warn_cut(truncated, result.corpus)
        difference: dict[str, Any] = {}
        if baseline is not None:
            tokenize = translator.config.train.tokenize
            difference = compare(baseline, result.outputs, result.references, tokenize)
        title = f"{printable(result.corpus)}, step {', '.join(map(str, translator.steps))}"
        if options.json:
            search = asdict(result.search)
            record = {"corpus": result.corpus, "steps": translator.steps, "search": search}
            more = {"baseline": difference} if difference else {}
            print(json.dumps(record | result.scores | more))
            continue
        if len(searches) > 1:
            _print_row(result, title if is_first else None)
        else:
            _print(result, title, options.show, options.worst)
        _print_difference(difference)


def _evaluations(
    options: Evaluate,
    translator: Translator,
    corpora: Sequence[str],
    searches: Sequence[DecodeConfig],
    others: Sequence[Sequence[str]],
) -> Iterator[Evaluation]:
    """Yields evaluations, shows how far they are, and writes translations. UserError: to one file,
    those of several."""
    if options.output is not None and (count := len(searches) * len(corpora)) > 1:
        raise UserError(f"--output={options.output}: needs one corpus and search, not {count}")
    path = None
    if options.output is not None:
        read = [Corpus(name, "validation", translator.config.data.fields) for name in corpora]
        inputs = [path for corpus in read for path, _ in corpus.file_digests]
        path = output_file(options.output, [*inputs, *options.references, options.baseline])
    count = len(searches) * sum(_count(name, translator.config) for name in corpora)
    with progress(count, options.output or os.devnull) as advance:
        language = options.language
        for result in evaluate(translator, corpora, language, searches, others, advance):
            if path is not None and is_coordinator():
                write_whole(path, "".join(f"{line}\n" for line in result.outputs))
            yield result


def _numbers(option: str, text: str | None, kind: Callable[[str], Any]) -> list[Any]:
    """Returns the numbers of a text such as 1,4,5; none without a text."""
    try:
        return [] if text is None else [kind(number) for number in text.split(",")]
    except ValueError as error:
        raise UserError(f"{option}={text}: must be numbers, with commas between them") from error


def _read_beside(corpora: Sequence[str], config: Config, option: str, path: str) -> list[str]:
    """Returns the targets of a baseline, or of a further reference.

    UserError: there is not one for each pair.
    """
    if len(corpora) > 1:
        raise UserError(f"{option}={path}: needs one corpus, not {len(corpora)}")
    lines, pairs = list(read_lines(path)), _count(corpora[0], config)
    if len(lines) != pairs:
        must = f"must have {pairs}, one for each pair of {corpora[0]}"
        raise UserError(f"{option}={path}: has {len(lines)} lines; {must}")
    return lines


def _count(name: str, config: Config) -> int:
    return sum(1 for _ in Corpus(name, "validation", config.data.fields).pairs())


def _print(result: Evaluation, title: str, show: int, worst: int) -> None:
    dev, outputs = result.dev, result.outputs
    if show or worst:
        chrf = line_scores(outputs, result.references)
        lines = list(zip(itertools.count(1), chrf, dev.sources, outputs, dev.references))
        order = sorted(lines, key=lambda line: line[1])
        _print_lines("", lines[:show])
        _print_lines("worst ", order[:worst])
        _print_lines("best ", order[: -worst - 1 : -1])
    scores: dict[str, Any] = dict(result.scores)
    signatures = scores.pop("signatures")
    print(f"{title}: {'  '.join(f'{name} {value:.4g}' for name, value in scores.items())}")
    for name, signature in signatures.items():
        print(f"    {name}: {signature}")


def _print_lines(title: str, lines: Sequence[tuple[int, float, str, str, str]]) -> None:
    for number, chrf, source, output, reference in lines:
        print(f"{title}line {number}, chrF {chrf:.1f}")
        print(f"{title}source     {printable(source)}")
        print(f"{title}output     {printable(output)}")
        print(f"{title}reference  {printable(reference)}\n")


def _print_row(result: Evaluation, title: str | None) -> None:
    """Prints a row of the table of several searches; the first one after the table's title."""
    if title:
        print(title)
        for signature in result.scores["signatures"].values():
            print(f"    {signature}")
        print("  ".join(f"{name:>15}" for name in ("beam", "alpha", *COLUMNS)))
    values = [f"{result.search.beam}", f"{result.search.alpha:g}"]
    values += [f"{result.scores[name]:.4g}" for name in COLUMNS]
    print("  ".join(f"{value:>15}" for value in values))


def _print_difference(difference: dict[str, Any]) -> None:
    for name, result in difference.items():
        ours, theirs = result["ours"], result["baseline"]
        print(
            f"    {name} {ours['score']:.2f} (± {ours['ci']:.2f}), baseline {theirs['score']:.2f} "
            f"(± {theirs['ci']:.2f}), p = {result['p_value']:.4f}: {result['signature']}"
        )
