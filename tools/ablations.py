"""Changes one part of the recipe of Multi30k at a time, and says which changes matter.

    python -m tools.ablations --data ../shared/data/multi30k

Each run has a third of the steps of the recipe, and each change two seeds. Writes
results/ablations.json, after each run; a file that holds some of the runs is continued.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools import campaign
from tools.campaign import Rows
from tools.measured import measure
from tools.multi30k import TEST, corpus, recipe, shortened
from transformer_jax.allocator import restart_with_allocator
from transformer_jax.config import Config
from transformer_jax.parallel.program_cache import cache_programs
from transformer_jax.runs.run import Run

NAME = "ablations"
SEEDS = (0, 1)
BASE = "recipe"
SCORE = "val_bleu"
"""The score that decides: test scores are shown, and choose nothing."""


def _model(**changes: Any) -> Callable[[Config], Config]:
    return lambda config: replace(config, model=replace(config.model, **changes))


def _optimizer(**changes: Any) -> Callable[[Config], Config]:
    return lambda config: replace(config, optimizer=replace(config.optimizer, **changes))


def _tokenizer(**changes: Any) -> Callable[[Config], Config]:
    return lambda config: replace(config, tokenizer=replace(config.tokenizer, **changes))


def _r_drop(config: Config) -> Config:
    """Returns the config with R-Drop and half of the pairs, which it computes twice."""
    data = replace(config.data, batch_tokens=config.data.batch_tokens // 2)
    return replace(_optimizer(r_drop=3.0)(config), data=data)


CHANGES: dict[str, Callable[[Config], Config]] = {
    BASE: lambda config: config,
    "r_drop": _r_drop,
    "bpe_dropout": _tokenizer(sampling=0.1),
    "adam": _optimizer(kind="adam"),
    "attention_of_the_paper": _model(positions="sinusoidal", kv_heads=None),
    "no_averaging": _optimizer(ema=None),
    "shallow_decoder": _model(decoder_layers=1),
}


def configs(data: Path) -> dict[str, Config]:
    """Returns the config of each change and seed, named CHANGE_SEED."""
    return {
        f"{name}_{seed}": change(shortened(recipe(data, seed=seed), 3))
        for seed in SEEDS
        for name, change in CHANGES.items()
    }


def summarize(rows: Rows) -> dict[str, Any]:
    """Returns the mean of each change, and how it differs from the recipe.

    The standard deviation of a seed is pooled over all changes; that of a difference of two means
    of n seeds is √(2 / n) of it. A difference below two of those is called none.
    """
    scores = {name: [rows[f"{name}_{seed}"][SCORE] for seed in SEEDS] for name in CHANGES}
    deviation = pooled_deviation(list(scores.values()))
    of_difference = math.sqrt(2 / len(SEEDS)) * deviation
    means = {name: statistics.mean(values) for name, values in scores.items()}
    found = {}
    for name, mean in means.items():
        difference = mean - means[BASE]
        verdict = "none" if abs(difference) < 2 * of_difference else _sign(difference)
        tests = [rows[f"{name}_{seed}"]["bleu_cased_13a"] for seed in SEEDS]
        found[name] = {
            f"mean_{SCORE}": mean,
            "difference": difference,
            "verdict": verdict,
            "mean_cased_13a": statistics.mean(tests),
            "minutes": statistics.mean(rows[f"{name}_{seed}"]["minutes"] for seed in SEEDS),
        }
    return {"seeds": SEEDS, "deviation_of_a_seed": deviation, "changes": found}


def pooled_deviation(groups: Sequence[Sequence[float]]) -> float:
    """Returns the standard deviation within groups of the same size."""
    return math.sqrt(statistics.mean(statistics.variance(group) for group in groups))


def _sign(difference: float) -> str:
    return "better" if difference > 0 else "worse"


def main() -> None:
    """Reads --data, trains, and writes the result file."""
    restart_with_allocator()
    options = campaign.arguments(__doc__)
    data = options.data
    cache_programs()
    dev, test = corpus(data, "val"), corpus(data, TEST)

    def row(_: str, trained: Run) -> dict[str, Any]:
        return measure(trained, dev, test, "de")[0]

    campaign.study(NAME, configs(data), row, summarize, Path("runs/ablations"), options.only)


if __name__ == "__main__":
    main()
