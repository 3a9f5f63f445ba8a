"""Scores the Multi30k run and writes results/multi30k_en_de.json and .svg; see `make multi30k`.

The length normalization is chosen on `val`; the test set is translated once, with that choice.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path
from typing import Any

from transformer_jax import plot
from transformer_jax.allocator import restart_with_allocator
from transformer_jax.benchmark import results
from transformer_jax.config import DecodeConfig, to_json
from transformer_jax.decoding.evaluation import score
from transformer_jax.decoding.translator import Translator
from transformer_jax.models.make import count_parameters
from transformer_jax.parallel.program_cache import cache_programs
from transformer_jax.runs import checkpoint, run
from transformer_jax.runs.run import Run
from transformer_jax.text.corpus import Corpus
from transformer_jax.training import reporters as reporting

SEARCHES = [
    DecodeConfig(beam=5, penalty="power", alpha=alpha) for alpha in (0.6, 0.8, 1.0, 1.2, 1.4)
]


def measure(trained: Run, folder: Path) -> dict[str, Any]:
    """Chooses the search on val, and returns the scores on the test set and what the run was."""
    val, test = (
        list(zip(*Corpus(f"{folder}/{name}.en.gz,{folder}/{name}.de.gz").pairs(), strict=True))
        for name in ("val", "test_2016_flickr")
    )
    translators = [Translator.load(trained.folder, decode=search) for search in SEARCHES]
    on_val = [score(translator(val[0]), val[1])["bleu"] for translator in translators]
    best = max(range(len(SEARCHES)), key=on_val.__getitem__)
    found = score(translators[best](test[0]), test[1], "de")
    records = reporting.read_metrics(trained.folder / "metrics.jsonl")
    training = [r for r in records if r["kind"] == "train"]
    evaluations = [r for r in records if r["kind"] == "evaluation"]
    config, last = trained.config, checkpoint.steps(trained.checkpoints)[-1]
    sizes = trained.tokenizers.source.size, trained.tokenizers.target.size
    return {
        "bleu_lower_tokenised": found["bleu_lower_tokenised"],
        "bleu_cased_13a": found["bleu"],
        "chrf": found["chrf"],
        "signatures": found["signatures"],
        "parameters": count_parameters(config.model, *sizes),
        "minutes": checkpoint.progress(trained.checkpoints, last)["seconds"] / 60,
        "steps": last,
        "best_step": trained.best_step(),
        "seed": config.train.seed,
        "target_tokens_per_s": statistics.median(r["tokens_per_s"] for r in training),
        "val_bleu_by_alpha": {f"{s.alpha:g}": b for s, b in zip(SEARCHES, on_val, strict=True)},
        "search": dataclasses.asdict(SEARCHES[best]),
        "config": to_json(config),
        "data_digests": {
            name: Corpus(f"{folder}/{name}.en.gz,{folder}/{name}.de.gz").digest
            for name in ("train", "val", "test_2016_flickr")
        },
        "evaluations": [{"step": r["step"], **next(iter(r["sets"].values()))} for r in evaluations],
    }


def main() -> None:
    """Reads --run and --data, writes the result file and the training curve."""
    restart_with_allocator()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    cache_programs()
    found = measure(run.load(options.run), options.data)
    print(results.write("multi30k_en_de", "make multi30k", found))
    plot.save(plot.training_curve(found["evaluations"]), results.FOLDER / "multi30k_en_de.svg")


if __name__ == "__main__":
    main()
