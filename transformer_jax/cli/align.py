"""The command `align`."""

from __future__ import annotations

from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import Align
from transformer_jax.cli.common import load_translator, pair_windows, parse_layers
from transformer_jax.decoding.alignment import align_pieces, pharaoh
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.parallel.processes import is_coordinator


def run(options: Align, arguments: ConfigArguments) -> None:
    """Prints the alignment of each pair; that of blank lines is blank."""
    translator = load_translator(options, arguments)
    scorer = Scorer.like(translator, parse_layers("--layer", options.layer))
    of_source, of_target = (side.pieces for side in translator.tokenizers)
    for first, sources, targets in pair_windows(options, translator.config):
        for number, pair in enumerate(scorer(sources, targets, first), first):
            pieces = of_source(translator.encode(sources[number - first])), of_target(pair.ids)
            assert pair.attention is not None
            found = align_pieces(pair.attention, *pieces, words=not options.pieces)
            if is_coordinator():
                print(pharaoh(found))
