"""Nine kinds of attention in the same tiny model on Multi30k; see `make attention-kinds`.

Everything but the attention is that of configs/multi30k_en_de.py, for fewer steps. Each kind has a
run of its own, so that the command given again continues where it was stopped. Writes
results/attention_kinds.json and .svg.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.axes import Axes

from transformer_jax import checkpoint, corpus, loop, parallel, plot, reporting
from transformer_jax.allocator import restart_with_allocator
from transformer_jax.benchmark import gradient_noise, results
from transformer_jax.benchmark.timing import in_turns
from transformer_jax.config import AttentionConfig, Config, differences, load_config_file, to_json
from transformer_jax.evaluate import score
from transformer_jax.model import Transformer, count_parameters
from transformer_jax.prepare import Setup, init_fn, prepare, update_fn
from transformer_jax.run import Run
from transformer_jax.tokenizer import EOS
from transformer_jax.translate import Translator
from transformer_jax.types import Batch

FOLDER = Path("runs/attention_kinds")
TEST = "test_2016_flickr"
STEPS = 2000
LAYER = 3  # the last: what is picked there changes the prediction of its own token only
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
"""What differs from the model of the config: "soft" is the paper's. "modern": rotary positions and
one head of keys and values."""


def files(data: Path, name: str) -> str:
    """The name of a corpus of Multi30k in the folder `data`."""
    return f"{data}/{name}.en.gz,{data}/{name}.de.gz"


def config_of(changes: dict[str, Any], data: Path) -> Config:
    """The config of Multi30k with another attention, ending at `STEPS`, scored there only."""
    base = load_config_file("configs/multi30k_en_de.py")
    return replace(
        base,
        model=replace(base.model, **changes),
        data=replace(base.data, train=(files(data, "train"),), dev=(files(data, "val"),)),
        optimizer=replace(base.optimizer, decay_steps=STEPS),
        train=replace(base.train, steps=STEPS, evaluate_every=STEPS),
    )


def train(config: Config, folder: Path) -> Run:
    """The run, trained to its end; one that is there is continued. SystemExit: it was stopped."""
    with reporting.Terminal() as terminal:
        made = loop.train(config, folder, reporters=[terminal])
    if config.train.steps not in checkpoint.steps(made.checkpoints):
        raise SystemExit(f"{folder} is not finished; the same command goes on from here")
    return made


def measure(made: Run, test: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Scores of the averaged weights: loss on the development set, the test set translated.

    minutes: of training, which may have shared the machine; train_tokens_per_s did not.
    """
    sources, references = map(list, zip(*test, strict=True))
    found = score(Translator.load(made.folder)(sources), references, "de")
    records = reporting.read_metrics(made.folder / "metrics.jsonl")
    last = [r for r in records if r["kind"] == "evaluation"][-1]
    sizes = made.tokenizers.source.size, made.tokenizers.target.size
    return {
        "validation_loss": next(iter(last["sets"].values()))["loss"],  # nats a token, unsmoothed
        "bleu_cased_13a": found["bleu"],
        "bleu_lower_tokenised": found["bleu_lower_tokenised"],
        "chrf": found["chrf"],
        "signatures": found["signatures"],
        "parameters": count_parameters(made.config.model, *sizes),
        "steps": last["step"],
        "minutes": checkpoint.progress(made.checkpoints, last["step"])["seconds"] / 60,
    }


def speed(setup: Setup, configs: dict[str, Config], batch: Batch) -> dict[str, float]:
    """Target tokens a second of each kind's training step on the same batch.

    Medians of `SAMPLES`, for which all kinds make steps in turns.
    """
    key, steps, states = jax.random.key(0), {}, {}
    sizes = setup.tokenizers.source.size, setup.tokenizers.target.size
    for label, config in configs.items():
        own = replace(setup, config=config, model=Transformer(config.model, *sizes))
        states[label] = parallel.compile(init_fn(own), setup.mesh)(key, batch)
        steps[label] = parallel.compile(update_fn(own), setup.mesh, donate=True)

    def run(label: str) -> None:
        states[label] = jax.block_until_ready(steps[label](states[label], batch, key)[0])

    tokens = np.count_nonzero(batch.target_out)
    times = in_turns({label: partial(run, label) for label in configs}, SAMPLES)
    return {label: tokens / statistics.median(each) for label, each in times.items()}


def fullest_batch(setup: Setup) -> Batch:
    """Of the first 16 batches of training the one with most target tokens."""
    first = (batch for _, batch in itertools.islice(setup.loader.batches(), 16))
    return max(first, key=lambda batch: np.count_nonzero(batch.target_out))


def cross_weights(made: Run, batch: Batch) -> np.ndarray:
    """Weights [T, S] of the last decoder layer over the source, the mean of its heads."""
    tokenizers, config = made.tokenizers, made.config.model
    model = Transformer(config, tokenizers.source.size, tokenizers.target.size, kernel="reference")
    aux: Any = jax.jit(model.apply)({"params": made.weights()}, batch)[1]
    return np.asarray(aux[f"decoder/{config.depths[1] - 1}/cross_attention"])[0].mean(axis=0)


def picture(made: dict[str, Run], pair: tuple[str, str]) -> Axes:
    """`cross_weights` of each kind for the same pair; all runs have the same tokenizers."""
    first = next(iter(made.values()))
    tokenizers, start_id = first.tokenizers, first.config.model.decoder_start_id
    source, target = ([*t.encode(text), EOS] for t, text in zip(tokenizers, pair, strict=True))
    shifted = [start_id, *target[:-1]]
    batch = Batch(*(np.array([ids], np.int32) for ids in (source, shifted, target)))
    weights = {label: cross_weights(run, batch) for label, run in made.items()}
    names = tokenizers.source.pieces(source), tokenizers.target.pieces(target)
    return plot.attention_maps(weights, *names)


def main() -> None:
    """Trains, measures, and writes the result file and the picture."""
    restart_with_allocator()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    data = parser.parse_args().data
    parallel.cache_programs()
    configs = {label: config_of(changes, data) for label, changes in KINDS.items()}
    made = {label: train(config, FOLDER / label) for label, config in configs.items()}
    test = list(corpus.read_pairs(files(data, TEST)))
    setup = prepare(configs["soft"], made["soft"])
    batch = fullest_batch(setup)
    speeds = speed(setup, configs, batch)
    kinds = {
        label: {"differs": differences(configs["soft"], configs[label])}
        | measure(run, test)
        | {"train_tokens_per_s": speeds[label]}
        for label, run in made.items()
    }
    found = {
        "kinds": kinds,
        "estimators": gradient_noise.compare(made["hard"], made["gumbel"], batch),
        "search": dataclasses.asdict(configs["soft"].decode),
        "batch": [*np.shape(batch.source), np.shape(batch.target_out)[1]],  # rows, source, target
        "config": to_json(configs["soft"]),
        "data_digests": {n: corpus.digest(files(data, n)) for n in ("train", "val", TEST)},
    }
    print(results.write("attention_kinds", "make attention-kinds", found))
    pair = next(iter(corpus.read_pairs(files(data, "val"))))
    plot.save(picture(made, pair), results.FOLDER / "attention_kinds.svg")


if __name__ == "__main__":
    main()
