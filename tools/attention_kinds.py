"""Measures of the study of attention kinds: the speed of a step, the noise of the gradients from
which sampled choices learn, and the attention weights of one sentence."""

import itertools
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure

from tools.scores import Data, Scored, texts, translations
from tools.study import Rows
from transformer_jax import plot
from transformer_jax.benchmark.timing import time_in_turns, timer
from transformer_jax.config import Config, DecodeConfig
from transformer_jax.decoding.attention_weights import attention_weights
from transformer_jax.decoding.translator import Translator
from transformer_jax.models.transformer import Transformer
from transformer_jax.parallel.compile import compile_function
from transformer_jax.runs import checkpoint
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import PAD
from transformer_jax.training.setup import Setup, prepare, prepare_step
from transformer_jax.training.step import loss_fn
from transformer_jax.types import Batch, Params

TURNS = 9
GRADIENTS = 256


def score(trained: Run, data: Data) -> Scored:
    """Returns the scores of a run with the search of its config, its weights for the first
    development pair, and the noise of its gradients where it samples choices."""
    values, outputs = translations(trained, data, [trained.config.decode])
    values["validation_loss"] = values["evaluations"][-1]["loss"]  # nats a token, unsmoothed
    values["attention"] = attention(trained, next(iter(data.corpus(data.dev).pairs())))
    if trained.config.model.cross_attention.kind in ("hard", "gumbel"):
        batch = fullest_batch(prepare(trained.config, trained.tokenizers))
        values["estimators"] = estimators(trained, batch, GRADIENTS)
    return values, outputs


def speeds(configs: dict[str, Config]) -> dict[str, float]:
    """Returns the target tokens per second of each kind's training step on the same batch.

    They are medians of `TURNS`, taken in turns. The configs have the same data and tokenizers.
    """
    setup = prepare(next(iter(configs.values())))
    batch, key, steps, states = fullest_batch(setup), jax.random.key(0), {}, {}
    for label, config in configs.items():
        kind = prepare_step(config, setup.tokenizers.sizes, setup.mesh)
        states[label] = compile_function(kind.init, setup.mesh)(key)
        steps[label] = kind.compile_gradients(), kind.compile_apply()

    def run(label: str) -> None:
        (compute, apply), state = steps[label], states[label]
        states[label] = jax.block_until_ready(apply(state, *compute(state, batch, key))[0])

    tokens = np.count_nonzero(batch.target_out != PAD)
    times = time_in_turns({label: timer(partial(run, label)) for label in configs}, TURNS)
    return {label: tokens / samples.median for label, samples in times.items()}


def decode_speeds(runs: dict[str, Path], sources: list[str]) -> dict[str, float]:
    """Returns the sentences a second with which each run translates, greedily, in turns."""
    search = DecodeConfig(beam=1)
    translators = {label: Translator.load(run, decode=search) for label, run in runs.items()}
    calls = {label: timer(partial(texts, each, sources)) for label, each in translators.items()}
    times = time_in_turns(calls, TURNS)
    return {label: len(sources) / samples.median for label, samples in times.items()}


def fullest_batch(setup: Setup) -> Batch:
    """Returns the batch with the most target tokens among the first 16 of training."""
    first = (loaded.batch for loaded in itertools.islice(setup.loader.batches(), 16))
    return max(first, key=lambda batch: np.count_nonzero(batch.target_out != PAD))


def estimators(trained: Run, batch: Batch, samples: int) -> dict[str, dict[str, float]]:
    """Returns the noise of the gradient; of REINFORCE also without its trained baseline.

    The baseline is the running mean of a token's log-likelihood in nats. It does not change the
    mean of the gradient. A batch n times as large divides the variance by n.
    """
    baselines = {"gumbel": 0.0}
    if trained.config.model.cross_attention.kind == "hard":
        training = checkpoint.restore(trained.checkpoints, trained.best_step(), "training")
        baseline = float(training["averages"]["log_likelihood"])
        baselines = {"hard": baseline, "hard, baseline 0": 0.0}
    return {name: gradient_noise(trained, batch, b, samples) for name, b in baselines.items()}


def gradient_noise(trained: Run, batch: Batch, baseline: float, samples: int) -> dict[str, float]:
    """Returns the variance and the squared mean of the gradient with respect to the projections.

    The gradient is of the loss per token, with respect to the query's and key's projections of the
    one layer that samples, at the trained parameters and on one batch. Rewards have weight 1;
    dropout and the entropy bonus are off, so that nothing else is random. `variance` is the trace
    of the covariance. `squared_mean` is the squared norm of the mean of `samples` gradients less
    variance / samples, its bias; where it is not well above that, the mean is indistinguishable
    from 0.
    """
    chosen = replace(trained.config.model.cross_attention, entropy=0.0, reward=1.0)
    config = replace(trained.config.model, dropout=0.0, cross_attention=chosen)
    model = Transformer(config, *trained.tokenizers.sizes)
    params = trained.params()
    averages = {"log_likelihood": jnp.float32(baseline)}

    @jax.jit
    def sample(key: jax.Array, params: Params, batch: Batch) -> jax.Array:
        gradient: Any = jax.grad(loss_fn(model, 0.0), has_aux=True)
        of_model, _ = gradient(params, batch, key, averages)
        layer = of_model["decoder"][f"layers_{chosen.layer}"]["cross_attention"]
        tokens = jnp.sum(batch.target_out != PAD)
        return ravel_pytree((layer["query"], layer["key"]))[0] / tokens

    keys = jax.random.split(jax.random.key(0), samples)
    drawn = np.stack([np.asarray(sample(key, params, batch), np.float64) for key in keys])
    mean = drawn.mean(axis=0)
    variance = float(np.sum(np.square(drawn - mean)) / (samples - 1))
    squared_mean = float(mean @ mean) - variance / samples
    return {"variance": variance, "squared_mean": squared_mean, "baseline": baseline}


def attention(trained: Run, pair: tuple[str, str]) -> dict[str, list[Any]]:
    """Returns the tokens of a pair, and the cross-attention weights [T, S] of the last decoder
    layer, averaged over heads."""
    shown = attention_weights(Translator.load(trained.folder), *pair)
    weights = shown.layers["cross"][trained.config.model.depths[1] - 1].mean(axis=0)
    rounded = weights.astype(float).round(4).tolist()
    return {"source": shown.source, "target": shown.outputs, "weights": rounded}


def picture(rows: Rows) -> Figure:
    """Plots the weights of each run for the same pair. All runs have the same tokenizers."""
    if missing := [label for label, row in rows.items() if "attention" not in row]:
        sys.exit(f"no picture: rows without weights are to be trained again: {', '.join(missing)}")
    panels = {label: row["attention"] for label, row in rows.items()}
    first = next(iter(panels.values()))
    weights = {label: np.asarray(panel["weights"]) for label, panel in panels.items()}
    return plot.attention_maps(weights, first["source"], first["target"])
