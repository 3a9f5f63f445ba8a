"""Scores a run that was trained on Multi30k, and writes results/multi30k_en_LANGUAGE.json, the
translations of the test set, and a picture of the training; see `make multi30k`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from tools.measured import measure
from transformer_jax import plot
from transformer_jax.allocator import restart_with_allocator
from transformer_jax.benchmark import results
from transformer_jax.config import (
    TINY,
    Config,
    DataConfig,
    DecodeConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
    load_config_file,
)
from transformer_jax.files import write_whole
from transformer_jax.parallel.program_cache import cache_programs
from transformer_jax.runs import run
from transformer_jax.text.corpus import Corpus

TEST = "test_2016_flickr"


def corpus(folder: Path, name: str, language: str = "de") -> Corpus:
    """Returns a part of Multi30k: train, val or test_2016_flickr."""
    return Corpus(f"{folder}/{name}.en.gz,{folder}/{name}.{language}.gz")


def recipe(folder: Path, language: str = "de", seed: int = 0) -> Config:
    """Returns the recipe, configs/multi30k_en_de.py, of a language and a seed."""
    return _of(load_config_file("configs/multi30k_en_de.py"), folder, language, seed)


def first_recipe(folder: Path, seed: int = 0) -> Config:
    """Returns the recipe before that one, which other studies still change one part of."""
    steps = 10_000
    config = Config(
        model=replace(TINY, norm="pre", dropout=0.2, max_length=128),
        tokenizer=TokenizerConfig(vocabulary=4000),
        data=DataConfig(batch_tokens=2048),
        optimizer=OptimizerConfig(
            schedule="linear", learning_rate=0.003, warmup=500, decay_steps=steps, ema=0.998
        ),
        train=TrainConfig(steps=steps, evaluate_every=500, save_every=250, log_every=50),
        decode=DecodeConfig(beam=5, penalty="power", alpha=1.0),
    )
    return _of(config, folder, "de", seed)


def published_recipe(folder: Path, seed: int = 0) -> Config:
    """Returns the settings of the Transformer-tiny of Wu et al. 2021, the best published system of
    this size; the mean of its last ten checkpoints is to be evaluated. An epoch has 63 steps.
    """
    steps = 8000
    config = Config(
        model=replace(TINY, max_length=128),
        tokenizer=TokenizerConfig(vocabulary=10_000),
        data=DataConfig(batch_tokens=8192),
        optimizer=OptimizerConfig(schedule="inverse_sqrt", learning_rate=0.005, warmup=2000),
        train=TrainConfig(steps=steps, evaluate_every=800, save_every=80, keep=10, log_every=50),
        decode=DecodeConfig(beam=5),
    )
    return _of(config, folder, "de", seed)


def shortened(config: Config, part: int) -> Config:
    """Returns the config with 1 / part of its steps, for studies that compare many runs."""
    steps = (config.train.steps or 0) // part
    optimizer = replace(config.optimizer, decay_steps=steps)
    return replace(config, optimizer=optimizer, train=replace(config.train, steps=steps))


def _of(config: Config, folder: Path, language: str, seed: int) -> Config:
    names = {part: (corpus(folder, part, language).name,) for part in ("train", "val")}
    return replace(
        config,
        data=replace(config.data, train=names["train"], dev=names["val"]),
        train=replace(config.train, seed=seed),
    )


def main() -> None:
    """Reads --run, --data and --language, and writes the result files."""
    restart_with_allocator()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--language", choices=("de", "fr"), default="de")
    options = parser.parse_args()
    cache_programs()
    language = options.language
    name, command = f"multi30k_en_{language}", "make multi30k"
    command += "" if language == "de" else f"-{language}"
    dev, test = (corpus(options.data, part, language) for part in ("val", TEST))
    found, outputs = measure(run.load(options.run), dev, test, language)
    with write_whole(results.FOLDER / f"{name}.{TEST}.txt") as file:
        file.writelines(f"{line}\n" for line in outputs)
    plot.save(plot.training_curves({"": found["evaluations"]}), results.FOLDER / f"{name}.svg")
    print(results.write(name, command, found))


if __name__ == "__main__":
    main()
