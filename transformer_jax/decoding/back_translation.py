"""Checks that a model can make training pairs from text in the target language.

It translates the text to the source language, and these translations are the sources of the pairs
(Sennrich et al. 2016, "Improving Neural Machine Translation Models with Monolingual Data").
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain

from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.trained import TrainedModel
from transformer_jax.errors import UserError
from transformer_jax.special_ids import EOS
from transformer_jax.text.corpus import Pair
from transformer_jax.text.tokenizer import Tokenizer

SAMPLED = 200
"""Number of pairs, and of lines, that the checks look at."""

UNCOVERED = 0.2
"""Share of a text's tokens that are unknown or single bytes, above which the text is taken to be of
another language."""

GAIN = 0.5
"""Log probability, in nats a token, that the sources must gain from their own targets. On 200 pairs
of Multi30k, a model from English to French gains 5.0 from the English sides, and 0.3 from the
German ones."""


def require_direction(model: TrainedModel, pairs: Sequence[Pair]) -> None:
    """Checks that the model translates from the targets of pairs to their sources.

    UserError: it gives a token of the sources a smaller probability, given the targets, than the
    other way round, or hardly a larger one than given the targets of other pairs.
    """
    sources = [source for source, _ in pairs[:SAMPLED]]
    targets = [target for _, target in pairs[:SAMPLED]]
    backward = _mean_log_prob(model, targets, sources)
    forward = _mean_log_prob(model, sources, targets)
    if backward < forward:
        raise UserError(
            "--run: translates from the source to the target of --pairs (log probability "
            f"{forward:.2f} a token, the other way {backward:.2f}); name one of the other direction"
        )
    other = _mean_log_prob(model, targets[1:] + targets[:1], sources)
    if len(targets) > 1 and backward - other < GAIN:
        raise UserError(
            "--run: hardly uses the targets of --pairs to predict the sources (log probability "
            f"{backward:.2f} a token, with the targets of other pairs {other:.2f}); name a run "
            "that translates from their language, or train it further"
        )


def require_vocabulary(tokenizer: Tokenizer, lines: Sequence[str]) -> None:
    """Checks that a tokenizer has pieces for a text. UserError: its language is another."""
    ids = [tokenizer.encode(line) for line in lines[:SAMPLED]]
    pieces = tokenizer.pieces(list(chain.from_iterable(ids)))
    without = sum(bool(re.fullmatch(r"<unk>|<0x..>", piece)) for piece in pieces)
    if without > UNCOVERED * len(pieces):
        raise UserError(
            f"--text: {without / len(pieces):.0%} of its tokens are bytes or unknown in the source "
            "vocabulary of --run; name a text in the language that the run translates from"
        )


def _mean_log_prob(model: TrainedModel, sources: Sequence[str], targets: Sequence[str]) -> float:
    """Returns the mean log probability of the tokens of the targets, in nats."""
    limit, encode = model.max_length - 1, model.tokenizers.target.encode
    pairs = zip(sources, targets, strict=True)
    ids = [(model.encode(source), [*encode(target)[:limit], EOS]) for source, target in pairs]
    scores = Scorer.like(model).of_ids([pair for pair in ids if pair[0]])
    return sum(score.log_prob for score in scores) / max(sum(len(score.ids) for score in scores), 1)
