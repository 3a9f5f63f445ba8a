"""Scores: BLEU and chrF with their signatures, the published lower-cased ruler, loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import jax
import numpy as np
import sacrebleu
from jax.sharding import Mesh
from sacremoses import MosesPunctNormalizer, MosesTokenizer
from sacremoses.corpus import NonbreakingPrefixes

from transformer_jax import data, parallel
from transformer_jax.config import Config
from transformer_jax.corpus import Examples
from transformer_jax.model import Transformer
from transformer_jax.prepare import loss_fn
from transformer_jax.step import eval_step
from transformer_jax.types import Params


def score(
    hypotheses: Sequence[str], references: Sequence[str], language: str | None = None
) -> dict[str, Any]:
    """Cased sacreBLEU (13a) and chrF2 of raw text, with the signatures that say how, and the
    share of lines that are exactly the reference.

    With the target's `language` also `bleu_lower_tokenised`: BLEU after lower-casing, Moses
    normalisation and tokenisation of both sides, the ruler of published Multi30k scores, which
    gives some 4 points more for the same output. ValueError: Moses does not know the language.
    """
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    scores: dict[str, Any] = {
        "bleu": bleu.corpus_score(hypotheses, [references]).score,
        "chrf": chrf.corpus_score(hypotheses, [references]).score,
        "exact": float(np.mean([a == b for a, b in zip(hypotheses, references, strict=True)])),
        "signatures": {"bleu": str(bleu.get_signature()), "chrf": str(chrf.get_signature())},
    }
    if language is not None:
        plain = sacrebleu.BLEU(tokenize="none", force=True)
        lines, answers = (lower_tokenise(text, language) for text in (hypotheses, references))
        scores["bleu_lower_tokenised"] = plain.corpus_score(lines, [answers]).score
        signature = f"{plain.get_signature()}|prepared:lower+sacremoses-{language}"
        scores["signatures"]["bleu_lower_tokenised"] = signature
    return scores


def require_language(language: str) -> None:
    """ValueError: a language of which Moses knows no abbreviations and would take the English."""
    known = sorted({*NonbreakingPrefixes().available_langs.values()})
    if language not in known:
        raise ValueError(f"--language={language}: must be one of {', '.join(known)}")


def lower_tokenise(lines: Iterable[str], language: str) -> list[str]:
    """Lines lower-cased, punctuation normalised and tokenised as Moses does.

    ValueError: Moses does not know the language.
    """
    require_language(language)
    normalise = MosesPunctNormalizer(language).normalize
    tokenise = MosesTokenizer(language).tokenize
    return [str(tokenise(normalise(line.lower()), return_str=True, escape=True)) for line in lines]


def dev_loss_fn(
    model: Transformer, config: Config, mesh: Mesh, how: str = "jit"
) -> Callable[..., dict[str, float]]:
    """A function (weights, examples) -> loss and perplexity of those pairs, unsmoothed.

    Its third argument, if given, says before each batch whether to go on.
    """
    losses = parallel.compile(partial(eval_step, loss=loss_fn(model, 0.0)), mesh, how)

    def dev_loss(
        weights: Params, examples: Examples, go_on: Callable[[Any], bool] = lambda _: True
    ) -> dict[str, float]:
        batches = data.in_order(
            examples,
            config.data,
            decoder_start_id=config.model.decoder_start_id,
            devices=mesh.devices.size,
            process=(jax.process_index(), jax.process_count()),
        )
        return corpus_loss(
            losses(weights, parallel.put(batch, mesh)) for batch in takewhile(go_on, batches)
        )

    return dev_loss


def corpus_loss(sums: Iterable[tuple[Any, Any]]) -> dict[str, float]:
    """Loss in nats a token and perplexity, from batches' sums and counts."""
    total, count = np.sum(np.array(list(sums), np.float64).reshape(-1, 2), axis=0)
    loss = float(total / max(count, 1))
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
