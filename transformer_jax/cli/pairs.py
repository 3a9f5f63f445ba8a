"""The commands `score` and `align`, which read pairs of lines."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator

from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import Align, PairOptions, Score
from transformer_jax.cli.common import load_translator, parse_layers
from transformer_jax.config import Config
from transformer_jax.decoding.alignment import align_pieces, pharaoh
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.translator import WINDOW
from transformer_jax.parallel.processes import is_coordinator, require_same_everywhere
from transformer_jax.text.corpus import Corpus


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
