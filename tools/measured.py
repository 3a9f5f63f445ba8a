"""Measures a trained run: its length penalty, scores and samples, and what its training took."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from transformer_jax.config import DecodeConfig
from transformer_jax.decoding.evaluation import order_by_score, score
from transformer_jax.decoding.translator import Translator
from transformer_jax.models.make import count_parameters
from transformer_jax.runs import card, checkpoint
from transformer_jax.runs.run import Run
from transformer_jax.text.corpus import Corpus
from transformer_jax.training.reporters import read_metrics

SEARCHES = [
    DecodeConfig(beam=5, penalty="power", alpha=alpha) for alpha in (0.6, 0.8, 1.0, 1.2, 1.4)
]
SAMPLES = 3
"""Number of the worst and of the best translations that are shown."""


def measure(
    trained: Run, dev: Corpus, test: Corpus, language: str, averaged: Run | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Returns the values of a result, and the translations of `test`.

    The search is chosen on `dev`, and `test` is translated once, with that choice. averaged: a run
    of averaged checkpoints of `trained`, which then translates in its place.
    """
    translating = averaged or trained
    found = choose_search(translating, dev)
    sources, references = map(list, zip(*test.pairs(), strict=True))
    translator = Translator.load(translating.folder, decode=DecodeConfig(**found["search"]))
    outputs = [translation.text for translation in translator(sources)]
    scores = score(outputs, references, language)
    values = {
        "bleu_lower_tokenized": scores["bleu_lower_tokenized"],
        "bleu_cased_13a": scores["bleu"],
        "chrf": scores["chrf"],
        "length_ratio": scores["length_ratio"],
        "signatures": scores["signatures"],
        "test_digest": test.digest,
        "samples": samples(sources, outputs, references),
    }
    return values | found | training(trained), outputs


def choose_search(translating: Run, dev: Corpus) -> dict[str, Any]:
    """Returns the search that has the best BLEU on `dev`, and the BLEU of each."""
    sources, references = map(list, zip(*dev.pairs(), strict=True))
    translators = [Translator.load(translating.folder, decode=search) for search in SEARCHES]
    bleu = [
        score([translation.text for translation in translator(sources)], references)["bleu"]
        for translator in translators
    ]
    best = max(range(len(SEARCHES)), key=bleu.__getitem__)
    return {
        "val_bleu": bleu[best],
        "val_bleu_by_alpha": {f"{s.alpha:g}": b for s, b in zip(SEARCHES, bleu, strict=True)},
        "search": dataclasses.asdict(SEARCHES[best]),
    }


def training(trained: Run) -> dict[str, Any]:
    """Returns what training took, its curve, and the card of the run."""
    records = read_metrics(trained.folder / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "train"]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    last = checkpoint.steps(trained.checkpoints)[-1]
    return {
        "parameters": count_parameters(trained.config.model, *trained.tokenizers.sizes),
        "minutes": checkpoint.progress(trained.checkpoints, last)["seconds"] / 60,
        "target_tokens": steps[-1]["target_tokens"],
        "steps": last,
        "best_step": trained.best_step(),
        "seed": trained.config.train.seed,
        "target_tokens_per_s": statistics.median(r["tokens_per_s"] for r in steps),
        "evaluations": [{"step": r["step"], **next(iter(r["sets"].values()))} for r in evaluations],
        "card": card.make(trained),
    }


def samples(
    sources: list[str], outputs: list[str], references: list[str]
) -> dict[str, list[dict[str, Any]]]:
    """Returns the translations of the lowest and of the highest chrF2, and their lines."""
    order = order_by_score(outputs, references)
    chosen = {"worst": order[:SAMPLES], "best": order[-SAMPLES:]}
    return {
        name: [
            {"line": i + 1, "source": sources[i], "output": outputs[i], "reference": references[i]}
            for i in lines
        ]
        for name, lines in chosen.items()
    }
