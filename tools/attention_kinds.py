"""Compares nine kinds of attention in the same tiny model on Multi30k: `make attention-kinds`.

All else is as in `multi30k.first_recipe`, with fewer steps. Each kind has a run of its own, so
that the same command continues where it was stopped. Writes results/attention_kinds.json and .svg.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from tools import gradient_noise
from tools.multi30k import TEST, corpus, first_recipe
from transformer_jax import plot
from transformer_jax.allocator import restart_with_allocator
from transformer_jax.benchmark import results
from transformer_jax.benchmark.timing import time_in_turns, timer
from transformer_jax.config import AttentionConfig, Config, differences, to_json
from transformer_jax.decoding.evaluation import score
from transformer_jax.decoding.translator import Translator
from transformer_jax.models.make import count_parameters
from transformer_jax.models.transformer import Transformer
from transformer_jax.parallel.compile import compile_function
from transformer_jax.parallel.program_cache import cache_programs
from transformer_jax.runs import checkpoint
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import EOS, PAD
from transformer_jax.training import reporters as reporting
from transformer_jax.training import trainer as loop
from transformer_jax.training.setup import Setup, prepare, prepare_step
from transformer_jax.types import Batch

FOLDER = Path("runs/attention_kinds")
STEPS = 2000
LAYER = 3  # the last one, where a sampled choice changes the prediction of its own token only
SAMPLES = 9


def _cross(**attention: Any) -> dict[str, Any]:
    return {"cross_attention": AttentionConfig(**attention)}


KINDS: dict[str, dict[str, Any]] = {
    "soft": {},
    "hard": _cross(kind="hard", layer=LAYER),
    "gumbel": _cross(kind="gumbel", layer=LAYER),
    "local-m": _cross(kind="local-m", window=4),
    "local-p": _cross(kind="local-p", window=4),
    "latent": _cross(kind="latent"),
    "additive": _cross(score="additive"),
    "plain": {"encoder_attention": AttentionConfig(kind="plain")},
    "modern": {"positions": "rotary", "kv_heads": 1},
}
"""Changes to the model of the config. "soft" is the paper's; "modern" has rotary positions and one
head of keys and values."""


def config_of(changes: dict[str, Any], data: Path) -> Config:
    """Returns the config of Multi30k with a changed model, evaluated once, after `STEPS`."""
    base = first_recipe(data)
    return replace(
        base,
        model=replace(base.model, **changes),
        optimizer=replace(base.optimizer, decay_steps=STEPS),
        train=replace(base.train, steps=STEPS, evaluate_every=STEPS),
    )


def train(config: Config, folder: Path) -> Run:
    """Trains or continues the run in `folder`. SystemExit: it is stopped before its end."""
    with reporting.Terminal() as terminal:
        trained = loop.train(config, folder, reporters=[terminal])
    if config.train.steps not in checkpoint.steps(trained.checkpoints):
        raise SystemExit(f"{folder} is not finished; repeat the command to continue it")
    return trained


def measure(trained: Run, test: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Returns the development loss and the scores on the test set of the averaged parameters.

    minutes: training time, during which the machine may have been shared.
    """
    sources, references = map(list, zip(*test, strict=True))
    found = score(Translator.load(trained.folder)(sources), references, "de")
    records = reporting.read_metrics(trained.folder / "metrics.jsonl")
    last = [r for r in records if r["kind"] == "evaluation"][-1]
    return {
        "validation_loss": next(iter(last["sets"].values()))["loss"],  # nats a token, unsmoothed
        "bleu_cased_13a": found["bleu"],
        "bleu_lower_tokenized": found["bleu_lower_tokenized"],
        "chrf": found["chrf"],
        "signatures": found["signatures"],
        "parameters": count_parameters(trained.config.model, *trained.tokenizers.sizes),
        "steps": last["step"],
        "minutes": checkpoint.progress(trained.checkpoints, last["step"])["seconds"] / 60,
    }


def speed(setup: Setup, configs: dict[str, Config], batch: Batch) -> dict[str, float]:
    """Returns the target tokens per second of each kind's training step on the same batch.

    They are medians of `SAMPLES`, taken in turns.
    """
    key, steps, states = jax.random.key(0), {}, {}
    for label, config in configs.items():
        kind = prepare_step(config, setup.tokenizers.sizes, setup.mesh)
        states[label] = compile_function(kind.init, setup.mesh)(key)
        steps[label] = kind.compile_update()

    def run(label: str) -> None:
        states[label] = jax.block_until_ready(steps[label](states[label], batch, key)[0])

    tokens = np.count_nonzero(batch.target_out != PAD)
    times = time_in_turns({label: timer(partial(run, label)) for label in configs}, SAMPLES)
    return {label: tokens / samples.median for label, samples in times.items()}


def fullest_batch(setup: Setup) -> Batch:
    """Returns the batch with the most target tokens among the first 16 of training."""
    first = (loaded.batch for loaded in itertools.islice(setup.loader.batches(), 16))
    return max(first, key=lambda batch: np.count_nonzero(batch.target_out != PAD))


def cross_weights(trained: Run, batch: Batch) -> np.ndarray:
    """Returns the cross-attention weights [T, S] of the last decoder layer, averaged over heads."""
    tokenizers, config = trained.tokenizers, trained.config.model
    model = Transformer(config, *tokenizers.sizes, kernel="reference")
    output: Any = jax.jit(model.apply)({"params": trained.params()}, batch)
    weights = output.weights[f"decoder/{config.depths[1] - 1}/cross_attention"]
    return np.asarray(weights)[0].mean(axis=0)


def picture(runs: dict[str, Run], pair: tuple[str, str]) -> Figure:
    """Plots `cross_weights` of each kind for the same pair. All runs have the same tokenizers."""
    first = next(iter(runs.values()))
    tokenizers, start_id = first.tokenizers, first.config.model.decoder_start_id
    source, target = ([*t.encode(text), EOS] for t, text in zip(tokenizers, pair, strict=True))
    shifted = [start_id, *target[:-1]]
    batch = Batch(*(np.array([ids], np.int32) for ids in (source, shifted, target)))
    weights = {label: cross_weights(run, batch) for label, run in runs.items()}
    names = tokenizers.source.pieces(source), tokenizers.target.pieces(target)
    return plot.attention_maps(weights, *names)


def main() -> None:
    """Trains, measures, and writes the result file and the picture."""
    restart_with_allocator()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    data = parser.parse_args().data
    cache_programs()
    configs = {label: config_of(changes, data) for label, changes in KINDS.items()}
    runs = {label: train(config, FOLDER / label) for label, config in configs.items()}
    test = list(corpus(data, TEST).pairs())
    setup = prepare(configs["soft"], runs["soft"].tokenizers)
    batch = fullest_batch(setup)
    speeds = speed(setup, configs, batch)
    kinds = {
        label: {"differs": differences(configs["soft"], configs[label])}
        | measure(run, test)
        | {"train_tokens_per_s": speeds[label]}
        for label, run in runs.items()
    }
    found = {
        "kinds": kinds,
        "estimators": gradient_noise.compare(runs["hard"], runs["gumbel"], batch),
        "search": dataclasses.asdict(configs["soft"].decode),
        "batch": [*np.shape(batch.source), np.shape(batch.target_out)[1]],  # rows, source, target
        "config": to_json(configs["soft"]),
        "data_digests": {n: corpus(data, n).digest for n in ("train", "val", TEST)},
    }
    print(results.write("attention_kinds", "make attention-kinds", found))
    pair = next(iter(corpus(data, "val").pairs()))
    plot.save(picture(runs, pair), results.FOLDER / "attention_kinds.svg")


if __name__ == "__main__":
    main()
