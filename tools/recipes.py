"""Compares latent attention with attention pooling on recipes. Writes results/recipes.json.

    python -m tools.recipes

Trains configs/recipes.py and its baselines from several seeds, with the same steps, batches and
optimizer, and labels `recipes:test`, whose pairs of services do not occur in training. The config
was chosen on another sample of the corpus.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.allocator import restart_with_allocator
from transformer_jax.benchmark import results
from transformer_jax.config import AttentionConfig, Config, load_config_file, to_json
from transformer_jax.decoding.translator import Translator
from transformer_jax.models.make import count_parameters
from transformer_jax.parallel.program_cache import cache_programs
from transformer_jax.text.corpus import Corpus
from transformer_jax.training.trainer import train

SEEDS = (0, 1, 2)
_SOFT: dict[str, Any] = {"cross_attention": AttentionConfig()}
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "latent": (1, {}),
    "soft (attention pooling)": (1, _SOFT),
    "soft, one head, twice as wide, twice the steps": (2, _SOFT | {"heads": 1, "d_model": 128}),
    "latent, no positions": (1, {"positions": "none"}),
    "soft, no positions": (1, _SOFT | {"positions": "none"}),
    "soft on an encoder layer": (1, _SOFT | {"layers": 1, "d_ff": 128}),
}
"""Factor on the steps of configs/recipes.py, and changes to its model."""


def changed(config: Config, factor: int, model: dict[str, Any]) -> Config:
    """Returns the config with `factor` times the steps and a changed model."""
    steps = factor * (config.train.steps or 0)
    return replace(
        config,
        model=replace(config.model, **model),
        optimizer=replace(config.optimizer, decay_steps=steps),
        train=replace(config.train, steps=steps, evaluate_every=steps, save_every=steps),
    )


def measure(config: Config) -> dict[str, Any]:
    """Returns the shares of recipes with both labels right, and with each, by seed."""
    sources, references = zip(*Corpus("recipes:test").pairs(), strict=True)
    wanted = np.array([reference.split() for reference in references])
    found: dict[str, Any] = {"parameters": 0, "steps": config.train.steps}
    found |= {"both": [], "trigger": [], "action": []}
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            train(replace(config, train=replace(config.train, seed=seed)), Path(folder) / "run")
            translator = Translator.load(Path(folder) / "run")
        found["parameters"] = count_parameters(config.model, *translator.tokenizers.sizes)
        outputs = np.array([f"{output} - -".split()[:2] for output in translator(sources)])
        right = outputs == wanted
        found["both"].append(float(right.all(axis=1).mean()))
        found["trigger"].append(float(right[:, 0].mean()))
        found["action"].append(float(right[:, 1].mean()))
    return found


def main() -> None:
    """Trains every model and writes the result file."""
    restart_with_allocator()
    cache_programs()
    config = load_config_file("configs/recipes.py")
    models: dict[str, Any] = {}
    for name, changes in MODELS.items():
        models[name] = measure(changed(config, *changes))
        print(name, models[name], flush=True)
    about = {"seeds": SEEDS, "config": to_json(config)}
    print(results.write("recipes", "make recipes", {"models": models} | about))


if __name__ == "__main__":
    main()
