"""The command `score`."""

from __future__ import annotations

import json
import math
import sys

from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import Score
from transformer_jax.cli.common import load_translator, pair_windows
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.parallel.processes import is_coordinator


def run(options: Score, arguments: ConfigArguments) -> None:
    """Prints a line for each pair, and on standard error the perplexity of all."""
    translator = load_translator(options, arguments)
    scorer, pieces = Scorer.like(translator), translator.tokenizers.target.pieces
    total, tokens = 0.0, 0
    for first, sources, targets in pair_windows(options, translator.config):
        for number, found in enumerate(scorer(sources, targets, first), first):
            total, tokens = total + found.log_prob, tokens + len(found.ids)
            line = f"{found.log_prob:.6f}"
            if options.json:
                record = {"line": number, "log_prob": found.log_prob}
                each = {"tokens": pieces(found.ids), "log_probs": found.log_probs}
                line = json.dumps(record | each, ensure_ascii=False)
            if is_coordinator():
                print(line)
    if is_coordinator():
        perplexity = math.exp(min(-total / max(tokens, 1), 700.0))
        print(f"{tokens:,} tokens: perplexity {perplexity:.4f}", file=sys.stderr)
