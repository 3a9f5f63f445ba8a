"""Trains the recipe of Multi30k and the one before it with three seeds, and compares them.

    python -m tools.seeds --data ../shared/data/multi30k

Writes results/multi30k_seeds.json: mean and standard deviation of the scores over the seeds, and
the paired bootstrap of each seed against the same seed of the recipe before; and the translations
of the test set, results/multi30k_seeds.NAME.txt. A file that holds some of the seeds is continued.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools import campaign
from tools.campaign import Rows
from tools.measured import measure
from tools.multi30k import TEST, corpus, first_recipe, recipe
from transformer_jax.allocator import restart_with_allocator
from transformer_jax.benchmark import results
from transformer_jax.decoding.evaluation import compare
from transformer_jax.files import write_whole
from transformer_jax.parallel.program_cache import cache_programs
from transformer_jax.runs.run import Run

NAME = "multi30k_seeds"
SEEDS = (0, 1, 2)
RECIPES = {"recipe": recipe, "first": first_recipe}
SCORES: tuple[str, ...] = ("bleu_lower_tokenized", "bleu_cased_13a", "chrf", "val_bleu", "minutes")


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the mean and the standard deviation of each score over the seeds."""
    found = {}
    for name in SCORES:
        values, short = [run[name] for run in runs], name.removeprefix("bleu_")
        found[f"mean_{short}"] = statistics.mean(values)
        found[f"deviation_{short}"] = statistics.stdev(values)
    return found


def outputs_file(label: str) -> Path:
    """Returns the file of the translations of a run."""
    return results.FOLDER / f"{NAME}.{label}.txt"


def summarize(rows: Rows, references: Sequence[str]) -> dict[str, Any]:
    """Returns the statistics of each recipe, and the bootstrap of each seed."""
    first, new = ([rows[f"{name}_{seed}"] for seed in SEEDS] for name in ("first", "recipe"))
    bootstrap = [
        compare(_outputs(f"first_{seed}"), _outputs(f"recipe_{seed}"), references) for seed in SEEDS
    ]
    return {"seeds": SEEDS, **summary(new), "first": summary(first), "bootstrap": bootstrap}


def _outputs(label: str) -> list[str]:
    return outputs_file(label).read_text("utf-8").splitlines()


def main() -> None:
    """Reads --data, trains, and writes the result files."""
    restart_with_allocator()
    options = campaign.arguments(__doc__)
    data = options.data
    cache_programs()
    dev, test = corpus(data, "val"), corpus(data, TEST)
    references = [target for _, target in test.pairs()]

    def row(label: str, trained: Run) -> dict[str, Any]:
        values, outputs = measure(trained, dev, test, "de")
        with write_whole(outputs_file(label)) as file:
            file.writelines(f"{line}\n" for line in outputs)
        return values

    configs = {
        f"{name}_{seed}": make(data, seed=seed) for name, make in RECIPES.items() for seed in SEEDS
    }

    def whole(rows: Rows) -> dict[str, Any]:
        return summarize(rows, references)

    campaign.study(NAME, configs, row, whole, Path("runs/seeds"), options.only)


if __name__ == "__main__":
    main()
