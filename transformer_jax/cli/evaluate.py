"""The command `evaluate`."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from transformer_jax.cli.commands import Evaluate
from transformer_jax.cli.common import load_translator
from transformer_jax.decoding.evaluation import require_language
from transformer_jax.errors import UserError
from transformer_jax.parallel.processes import is_coordinator
from transformer_jax.printable import printable
from transformer_jax.training.validation import Evaluation, evaluate


def run(options: Evaluate) -> None:
    """Prints the scores of each corpus, and some translations."""
    if options.show < 0:
        raise UserError(f"--show={options.show}: must be at least 0")
    if options.language is not None:
        require_language(options.language)
    translator = load_translator(options)
    corpora = options.data or translator.config.data.dev
    search = dataclasses.asdict(translator.config.decode)
    for found in evaluate(translator, corpora, options.language):
        if not is_coordinator():
            continue
        if found.report.left_out:
            message = f"{found.corpus}: loss without over-long pairs: {found.report}"
            print(printable(message), file=sys.stderr)
        if options.json:
            record = {"corpus": found.corpus, "search": search} | found.scores
            print(json.dumps(record))
        else:
            _print(found, options.show)


def _print(found: Evaluation, show: int) -> None:
    texts = zip(found.sources, found.outputs, found.references, strict=True)
    for source, output, reference in list(texts)[:show]:
        print(f"source     {printable(source)}")
        print(f"output     {printable(output)}")
        print(f"reference  {printable(reference)}\n")
    scores: dict[str, Any] = dict(found.scores)
    signatures = scores.pop("signatures")
    values = "  ".join(f"{name} {value:.4g}" for name, value in scores.items())
    print(f"{printable(found.corpus)}: {values}")
    for name, signature in signatures.items():
        print(f"    {name}: {signature}")
