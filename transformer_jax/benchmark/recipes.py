"""Does latent attention read recipes that attention pooling cannot? Writes results/recipes.json.

    python -m transformer_jax.benchmark.recipes

Trains configs/recipes.py and its baselines from several seeds, with the same steps, batches and
optimizer, and labels `recipes:test`, whose couples of services training never has. The config was
chosen on another draw of the corpus.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax import corpus, parallel
from transformer_jax.allocator import restart_with_allocator
from transformer_jax.benchmark import results
from transformer_jax.config import AttentionConfig, Config, load_config_file, to_json
from transformer_jax.loop import train
from transformer_jax.model import count_parameters
from transformer_jax.translate import Translator

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
"""How many times the steps of configs/recipes.py, and what of its model differs."""


def changed(config: Config, times: int, model: dict[str, Any]) -> Config:
    """The config with so many times the steps, and another model."""
    steps = times * (config.train.steps or 0)
    return replace(
        config,
        model=replace(config.model, **model),
        optimizer=replace(config.optimizer, decay_steps=steps),
        train=replace(config.train, steps=steps, evaluate_every=steps, save_every=steps),
    )


def measure(config: Config) -> dict[str, Any]:
    """The shares of recipes whose labels, both and each, are right, by seed; parameters."""
    sources, references = zip(*corpus.read_pairs("recipes:test"), strict=True)
    wanted = np.array([reference.split() for reference in references])
    found: dict[str, Any] = {"parameters": 0, "steps": config.train.steps}
    found |= {"both": [], "trigger": [], "action": []}
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            train(replace(config, train=replace(config.train, seed=seed)), Path(folder) / "run")
            translator = Translator.load(Path(folder) / "run")
        sizes = translator.tokenizers.source.size, translator.tokenizers.target.size
        found["parameters"] = count_parameters(config.model, *sizes)
        outputs = np.array([f"{output} - -".split()[:2] for output in translator(sources)])
        right = outputs == wanted
        found["both"].append(float(right.all(axis=1).mean()))
        found["trigger"].append(float(right[:, 0].mean()))
        found["action"].append(float(right[:, 1].mean()))
    return found


def main() -> None:
    """Trains every model and writes the result file."""
    restart_with_allocator()
    parallel.cache_programs()
    config = load_config_file("configs/recipes.py")
    models: dict[str, Any] = {}
    for name, changes in MODELS.items():
        models[name] = measure(changed(config, *changes))
        print(name, models[name], flush=True)
    about = {"seeds": SEEDS, "config": to_json(config)}
    print(results.write("recipes", "make recipes", {"models": models} | about))


if __name__ == "__main__":
    main()
