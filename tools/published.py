"""Trains Multi30k with the published settings (Wu et al. 2021), as a reference for the recipe.

    python -m tools.published --data ../shared/data/multi30k

Writes results/multi30k_published.json. The model that is evaluated is the mean of the last ten
checkpoints. Other than there, the text is cased, and the 10,000 BPE ids are SentencePiece's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools import campaign
from tools.measured import measure
from tools.multi30k import TEST, corpus, published_recipe
from transformer_jax.allocator import restart_with_allocator
from transformer_jax.parallel.program_cache import cache_programs
from transformer_jax.runs import run
from transformer_jax.runs.run import Run

NAME = "multi30k_published"
FOLDER = Path("runs/published")


def averaged(trained: Run) -> Run:
    """Returns the run of the mean of the newest checkpoints, which is made once."""
    folder = trained.folder.with_name(f"{trained.folder.name}_averaged")
    if run.exists(folder):
        return run.load(folder)
    return run.average(trained, trained.newest_steps(), folder)


def main() -> None:
    """Reads --data, trains, and writes the result file."""
    restart_with_allocator()
    options = campaign.arguments(__doc__)
    cache_programs()
    dev, test = corpus(options.data, "val"), corpus(options.data, TEST)

    def row(_: str, trained: Run) -> dict[str, Any]:
        return measure(trained, dev, test, "de", averaged(trained))[0]

    configs = {"published_0": published_recipe(options.data)}
    campaign.study(NAME, configs, row, lambda _: {}, FOLDER, options.only)


if __name__ == "__main__":
    main()
