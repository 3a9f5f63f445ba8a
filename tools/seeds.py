"""Trains the recipe of Multi30k and the one before it with three seeds, and compares them.

    python -m tools.seeds --data ../shared/data/multi30k

Writes results/multi30k_seeds.json: mean and standard deviation of the scores over the seeds, and
the paired bootstrap of each seed against the same seed of the recipe before.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.campaign import train_all
from tools.measured import measure
from tools.multi30k import TEST, corpus, first_recipe, recipe
from transformer_jax.allocator import restart_with_allocator
from transformer_jax.benchmark import results
from transformer_jax.decoding.evaluation import compare
from transformer_jax.parallel.program_cache import cache_programs
from transformer_jax.runs.run import Run

SEEDS = (0, 1, 2)
RECIPES = {"recipe": recipe, "first": first_recipe}
SCORES: tuple[str, ...] = ("bleu_lower_tokenised", "bleu_cased_13a", "chrf", "val_bleu", "minutes")


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the mean and the standard deviation of each score over the seeds."""
    found = {}
    for name in SCORES:
        values = [run[name] for run in runs]
        short = {"bleu_lower_tokenised": "lower_tokenised", "bleu_cased_13a": "cased_13a"}
        found[f"mean_{short.get(name, name)}"] = statistics.mean(values)
        found[f"deviation_{short.get(name, name)}"] = statistics.stdev(values)
    return found


def study(data: Path, runs: dict[str, Run]) -> dict[str, Any]:
    """Returns the values of the result; `runs` are named RECIPE_SEED."""
    dev, test = corpus(data, "val"), corpus(data, TEST)
    references = [target for _, target in test.pairs()]
    measured = {name: measure(run, dev, test, "de") for name, run in runs.items()}
    values = {name: [measured[f"{name}_{seed}"][0] for seed in SEEDS] for name in RECIPES}
    bootstrap = [
        compare(measured[f"first_{seed}"][1], measured[f"recipe_{seed}"][1], references)
        for seed in SEEDS
    ]
    of_first = {"runs": values["first"]} | summary(values["first"])
    of_recipe = {"runs": values["recipe"]} | summary(values["recipe"])
    return {"seeds": SEEDS, **of_recipe, "first": of_first, "bootstrap": bootstrap}


def main() -> None:
    """Reads --data, trains, and writes the result file."""
    restart_with_allocator()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    data = parser.parse_args().data
    configs = {
        f"{name}_{seed}": make(data, seed=seed) for name, make in RECIPES.items() for seed in SEEDS
    }
    runs = train_all(configs, Path("runs/seeds"))
    cache_programs()
    print(results.write("multi30k_seeds", "make multi30k-seeds", study(data, runs)))


if __name__ == "__main__":
    main()
