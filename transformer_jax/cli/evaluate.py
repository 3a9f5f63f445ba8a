"""The command `evaluate`."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import Evaluate
from transformer_jax.cli.common import load_translator
from transformer_jax.decoding.evaluation import compare, order_by_score, require_language
from transformer_jax.errors import UserError, printable
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
    corpora = options.data or translator.config.data.dev
    baseline = None
    if options.baseline is not None:
        baseline = _read_baseline(options.baseline, corpora, translator.config.data.fields)
    decode = translator.config.decode
    pairs = itertools.product(beams or [decode.beam], alphas or [decode.alpha])
    n_best = decode.n_best if decode.sample else 1
    searches = [
        dataclasses.replace(decode, beam=beam, alpha=alpha, n_best=n_best) for beam, alpha in pairs
    ]
    for result in evaluate(translator, corpora, options.language, searches):
        if not is_coordinator():
            continue
        is_first = result.search == searches[0]
        report = result.dev.examples.report
        if report.left_out and is_first:
            message = f"{result.corpus}: loss without over-long pairs: {report}"
            print(printable(message), file=sys.stderr)
        difference = None
        if baseline is not None:
            difference = compare(baseline, result.outputs, result.dev.references)
        title = f"{printable(result.corpus)}, step {', '.join(map(str, translator.steps))}"
        if options.json:
            search = dataclasses.asdict(result.search)
            record = {"corpus": result.corpus, "steps": translator.steps, "search": search}
            more = {} if difference is None else {"baseline": difference}
            print(json.dumps(record | result.scores | more))
        elif len(searches) > 1:
            _print_row(result, title if is_first else None)
        else:
            _print(result, title, options.show, options.worst)
        if difference is not None and not options.json:
            _print_difference(difference)


def _numbers(option: str, text: str | None, kind: Callable[[str], Any]) -> list[Any]:
    """Returns the numbers of a text such as 1,4,5; none without a text."""
    try:
        return [] if text is None else [kind(number) for number in text.split(",")]
    except ValueError as error:
        raise UserError(f"{option}={text}: must be numbers, with commas between them") from error


def _read_baseline(path: str, corpora: Sequence[str], fields: tuple[str, str]) -> list[str]:
    """Returns the translations of a baseline. UserError: there is not one for each pair."""
    if len(corpora) > 1:
        raise UserError(f"--baseline={path}: needs one corpus, not {len(corpora)}")
    (name,) = corpora
    lines = list(read_lines(path))
    pairs = sum(1 for _ in Corpus(name, "validation", fields).pairs())
    if len(lines) != pairs:
        raise UserError(
            f"--baseline={path}: has {len(lines)} lines; must have {pairs}, one for each pair of "
            f"{name}"
        )
    return lines


def _print(result: Evaluation, title: str, show: int, worst: int) -> None:
    dev, outputs = result.dev, result.outputs
    triples = list(zip(dev.sources, outputs, dev.references, strict=True))
    _print_lines("", triples[:show])
    if worst:
        order = order_by_score(outputs, dev.references)
        _print_lines("worst ", [triples[i] for i in order[:worst]])
        _print_lines("best ", [triples[i] for i in order[: -worst - 1 : -1]])
    scores: dict[str, Any] = dict(result.scores)
    signatures = scores.pop("signatures")
    print(f"{title}: {'  '.join(f'{name} {value:.4g}' for name, value in scores.items())}")
    for name, signature in signatures.items():
        print(f"    {name}: {signature}")


def _print_lines(title: str, triples: Sequence[tuple[str, str, str]]) -> None:
    for source, output, reference in triples:
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
