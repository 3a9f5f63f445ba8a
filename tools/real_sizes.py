"""Plans the recipes for real sizes, and writes results/real_sizes.json.

    python -m tools.real_sizes

Nothing is trained: operations are counted from the traced step, memory is estimated, and hours are
arithmetic: the operations over the peak of the chips.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.scaling import CHIP
from transformer_jax.benchmark import results
from transformer_jax.config import Config, load_config_file
from transformer_jax.data.buckets import Shape
from transformer_jax.models.make import count_parameters
from transformer_jax.parallel.devices import ACCELERATORS
from transformer_jax.training.planning import Planner

RECIPES = (
    "iwslt14_de_en",
    "wmt14_en_de_base",
    "wmt14_en_de_big",
    "wmt14_en_fr_base",
    "wmt14_en_fr_big",
)
CHIPS = 8
LENGTH = 64
"""Tokens of each sentence, on both sides, as in results/scaling.json."""


def plan(config: Config) -> dict[str, Any]:
    """Returns what the recipe takes on `CHIPS` chips."""
    sizes = config.tokenizer.vocabulary, config.tokenizer.vocabulary
    planner = Planner(config, sizes, CHIPS)
    batch = Shape(config.data.batch_tokens // LENGTH, LENGTH, LENGTH)
    flops, memory = planner.flops(batch), planner.memory(planner.shape(batch))
    steps = config.train.steps
    assert steps is not None
    return {
        "parameters": count_parameters(config.model, *sizes),
        "batch_tokens": config.data.batch_tokens,
        "steps": steps,
        "microbatches": planner.setup.microbatches,
        "memory_mib": sum(memory) / 2**20,
        "tflop_per_step": flops / 1e12,
        "eflop": flops * steps / 1e18,
        "hours_at_peak": flops * steps / (CHIPS * ACCELERATORS[CHIP].tflops * 1e12) / 3600,
    }


def main() -> None:
    """Plans every recipe and writes the result file."""
    configs = {name: load_config_file(Path("configs") / f"{name}.py") for name in RECIPES}
    found = {name: plan(config) for name, config in configs.items()}
    about = {"chips": CHIPS, "chip": CHIP, "length": LENGTH}
    print(results.write("real_sizes", "make real-sizes", about | {"recipes": found}))


if __name__ == "__main__":
    main()
