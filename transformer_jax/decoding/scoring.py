"""Scores given pairs with a trained model, token by token, with its cross-attention if asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from transformer_jax.decoding.trained import TrainedModel, padded
from transformer_jax.errors import UserError
from transformer_jax.models.quantization import dequantize
from transformer_jax.models.transformer import Model
from transformer_jax.parallel.compile import compile_function
from transformer_jax.special_ids import PAD
from transformer_jax.text.corpus import Pair
from transformer_jax.text.tokenizer import Tokenizer
from transformer_jax.types import Batch, Params

HeadSelection = Sequence[tuple[int, int | None]]
"""Layers of cross-attention, each with a head or None for all, whose weights are averaged. Empty:
all layers."""


class PairScore(NamedTuple):
    """The score of a pair."""

    log_prob: float  # of the target given the source, in nats
    ids: tuple[int, ...]  # of the target, with the end symbol
    log_probs: tuple[float, ...]  # of each id
    attention: np.ndarray | None  # [T, S], for each id of the target and of the source
    reason: str | None = None  # why there is no score; `log_prob` is then nan


class Scorer:
    """Computes the log probabilities that a trained model gives to targets.

    Those of an output of a translator are its `Hypothesis.log_prob`, up to rounding. Of an ensemble
    it averages the probabilities, and the attention weights of the first model are returned.
    heads: which attention weights to return; None: none. UserError: the model has no such layer or
    head.
    """

    def __init__(self, trained: TrainedModel, heads: HeadSelection | None = None) -> None:
        if heads is not None:
            _require_heads(heads, trained.model)
        self._trained, self._heads = trained, heads
        self._score = compile_function(make_score(trained.models, heads), trained.mesh)

    def __call__(self, sources: Sequence[str], targets: Sequence[str]) -> list[PairScore]:
        """Returns the score of each pair; that of two blank lines is 0, and that of a pair that
        `encode_pair` refuses is nan, with the reason.

        UserError: there are more sources than targets, or fewer.
        """
        if len(sources) != len(targets):
            raise UserError(f"{len(sources)} sources and {len(targets)} targets: must be as many")
        pairs: list[tuple[list[int], list[int]]] = []
        reasons: dict[int, str] = {}
        for i, pair in enumerate(zip(sources, targets, strict=True)):
            try:
                pairs.append(self._trained.encode_pair(*pair))
            except UserError as error:
                pairs.append(([], []))
                reasons[i] = str(error)
        scores = self.of_ids(pairs)
        for i, reason in reasons.items():
            scores[i] = scores[i]._replace(log_prob=math.nan, reason=reason)
        return scores

    def of_ids(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        params: Sequence[Params] | None = None,
    ) -> list[PairScore]:
        """Returns the score of pairs of ids, as `TrainedModel.encode` and `Hypothesis.ids` are.

        params: those of each model; None: of the trained model.
        """
        trained = self._trained
        blank = None if self._heads is None else np.zeros((0, 0), np.float32)
        results = [PairScore(0.0, (), (), blank)] * len(pairs)
        lengths = [max(map(len, pair)) if pair[1] else 0 for pair in pairs]
        for (rows, width), members in trained.batches(lengths, trained.config.decode.batch_tokens):
            arrays = [
                padded([pairs[i][side] for i in members], (rows, min(width, most)))
                for side, most in enumerate((trained.max_length, trained.max_targets))
            ]
            scored = self._score(params or trained.all_params, trained.on_mesh(arrays))
            log_probs, weights = jax.device_get(jax.block_until_ready(scored))
            for row, i in enumerate(members):
                source, target = pairs[i]
                each = tuple(log_probs[row, : len(target)].tolist())
                attention = None if weights is None else weights[row, : len(target), : len(source)]
                results[i] = PairScore(float(np.sum(each)), tuple(target), each, attention)
        return results


def make_score(
    models: Sequence[Model], heads: HeadSelection | None = None
) -> Callable[[Sequence[Params], Any], tuple[Array, Array | None]]:
    """Returns a pure function (parameters of each model, (source [B, S], target [B, T])) -> (log
    probability of each target id [B, T], 0 at padding, and the mean attention weights [B, T, S] of
    the first model, or None)."""

    def score(
        params: Sequence[Params], pairs: Sequence[Int[Array, "B _"]]
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T S"] | None]:
        source, target = pairs
        weights, log_probs = None, []
        for i, (model, model_params) in enumerate(zip(models, params, strict=True)):
            if heads is not None and i == 0:
                model = model.clone(kernel="reference")  # which computes weights
            start = jnp.full_like(target[:, :1], model.config.start_id)
            shifted = jnp.concatenate([start, target[:, :-1]], axis=1)
            variables = {"params": dequantize(model_params)}
            output: Any = model.apply(variables, Batch(source, shifted, target))
            if heads is not None and i == 0:
                weights = _mean_weights(output.weights, heads)
            every = jax.nn.log_softmax(output.logits.astype(jnp.float32))
            log_probs.append(jnp.take_along_axis(every, target[..., None], axis=-1)[..., 0])
        mean = jax.nn.logsumexp(jnp.stack(log_probs), axis=0) - math.log(len(models))
        return jnp.where(target != PAD, mean, 0.0), weights

    return score


def _mean_weights(weights: dict[str, Array], heads: HeadSelection) -> Float[Array, "B T S"]:
    layers = [name for name in weights if name.endswith("/cross_attention")]
    parts = {name.partition("/")[0] for name in layers}
    of = "labels/cross_attention" if "labels" in parts else "decoder/{}/cross_attention"
    chosen = [(of.format(layer), head) for layer, head in heads]
    means = [
        jnp.mean(weights[name], axis=1) if head is None else weights[name][:, head]
        for name, head in chosen or [(name, None) for name in layers]
    ]
    return jnp.mean(jnp.stack(means), axis=0)


def _require_heads(heads: HeadSelection, model: Model) -> None:
    counts = {"layer": model.config.depths[1], "head": model.config.heads}
    for chosen in heads:
        for (name, count), number in zip(counts.items(), chosen, strict=True):
            if number is not None and not 0 <= number < count:
                what = f"{name} {number} of cross-attention"
                raise UserError(f"{what}: does not exist; must be from 0 to {count - 1}")


# Checks that a model can make training pairs from text in the target language: its translations of
# the text to the source language are the sources of the pairs (Sennrich et al. 2016, "Improving
# Neural Machine Translation Models with Monolingual Data").

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
    sources, targets = ([pair[side] for pair in pairs[:SAMPLED]] for side in (0, 1))
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
    ids, _ = tokenizer.encode_all(lines[:SAMPLED])
    if (share := tokenizer.uncovered(ids)) > UNCOVERED:
        raise UserError(
            f"--text: {share:.0%} of its tokens are bytes or unknown in the source "
            "vocabulary of --run; name a text in the language that the run translates from"
        )


def _mean_log_prob(model: TrainedModel, sources: Sequence[str], targets: Sequence[str]) -> float:
    """Returns the mean log probability of the tokens of the targets, in nats."""
    scores = [each for each in Scorer(model)(sources, targets) if each.reason is None]
    return sum(score.log_prob for score in scores) / max(sum(len(score.ids) for score in scores), 1)
