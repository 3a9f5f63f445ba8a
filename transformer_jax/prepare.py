"""From a config to all that training needs, before anything is written in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from transformer_jax import corpus, data, parallel, tokenizer
from transformer_jax.attention.kernels import check_kernel
from transformer_jax.config import Config
from transformer_jax.loss import reinforce, token_loss, token_losses
from transformer_jax.model import Transformer, check_labels, choices_of, make_model
from transformer_jax.optim import make_optimizer
from transformer_jax.run import Run
from transformer_jax.step import Metrics, TrainState, init_state, train_step
from transformer_jax.tokenizer import Tokenizers
from transformer_jax.types import Batch, Key, Params


@dataclass(frozen=True)
class DevSet:
    """A development corpus, as ids and as text."""

    examples: corpus.Examples
    sources: list[str]
    references: list[str]


@dataclass(frozen=True)
class Setup:
    """Everything training needs."""

    config: Config
    tokenizers: Tokenizers
    examples: corpus.Examples
    dev: dict[str, DevSet]
    loader: data.Loader
    model: Transformer
    optimizer: optax.GradientTransformation
    mesh: Mesh


def prepare(config: Config, known: Run | None = None) -> Setup:
    """Tokenizers (those of the run `known`, if given), tokenised corpora, batches and model.

    ValueError: input that cannot be read or trained on, or a kernel that cannot be had.
    """
    check_kernel(config.execution.kernel)
    options = config.data
    if known is None:
        pairs = _pairs(options.train, options.fields, "train")
        tokenizers = tokenizer.train(pairs, config.tokenizer, config.train.seed)
    else:
        tokenizers = known.tokenizers
    tokenise = partial(
        corpus.tokenise,
        tokenizers=tokenizers,
        config=options,
        max_length=config.model.max_length,
        process_index=jax.process_index(),
    )
    examples = tokenise(options.train, split="train", filters=True)
    dev: dict[str, DevSet] = {}
    for name in options.dev:
        sources, references = map(
            list, zip(*_pairs([name], options.fields, "validation"), strict=True)
        )
        ids = tokenise([name], split="validation", filters=False)
        dev[name] = DevSet(ids, sources, references)
    for found in (examples, *(some.examples for some in dev.values())):
        check_labels(config.model, int(found.lengths[:, 1].max()))
    mesh = parallel.make_mesh()
    loader = data.Loader(
        examples,
        options,
        seed=config.train.seed,
        sampling=config.tokenizer.sampling,
        decoder_start_id=config.model.decoder_start_id,
        devices=mesh.devices.size * config.optimizer.accumulate,
        process=(jax.process_index(), jax.process_count()),
    )
    sizes = tokenizers.source.size, tokenizers.target.size
    model = make_model(config.model, *sizes, config.execution.kernel)
    optimizer = make_optimizer(config.optimizer, config.model.d_model)
    return Setup(config, tokenizers, examples, dev, loader, model, optimizer, mesh)


def loss_fn(model: Transformer, smoothing: float) -> Callable[..., Any]:
    """The model's loss as the steps want it: (params, batch, key) -> (sum, count).

    Of a model with sampled choices, which learn from the running mean of their reward, there is a
    fourth argument, `TrainState.extra`.
    """

    def loss(params: Params, batch: Batch, key: Key | None, extra: Params | None = None) -> Any:
        logits, aux = model.apply({"params": params}, batch, key)
        total, count = token_loss(logits, batch.target_out, smoothing)
        if not extra:
            return total, count
        reward = -token_losses(logits, batch.target_out)
        ahead = model.config.cross_attention.layer != model.config.depths[1] - 1
        for found in choices_of(aux):
            real = batch.target_out > 0
            total += reinforce(*found, reward, extra["reward"], real, ahead=ahead)
        return total, (count, {"reward": jnp.sum(reward)})

    return loss


def init_fn(setup: Setup) -> Callable[[Key, Batch], TrainState]:
    """A pure function (key, batch) -> the state before the first update."""

    def init(key: Key, batch: Batch) -> TrainState:
        made: Any = setup.model.init_with_output(key, batch, key)
        (_, aux), variables = made
        params = variables["params"]
        extra = {"reward": jnp.zeros(())} if choices_of(aux) else {}
        return init_state(params, setup.optimizer, setup.config.optimizer.ema, extra)

    return init


def update_fn(setup: Setup) -> Callable[..., tuple[TrainState, Metrics]]:
    """The run's `train_step`: a pure function (state, batch, key, reduce=...)."""
    options = setup.config.optimizer
    return partial(
        train_step,
        loss=loss_fn(setup.model, options.label_smoothing),
        optimizer=setup.optimizer,
        accumulate=options.accumulate,
        ema=options.ema,
    )


def empty_batch(shape: data.Shape, packed: bool = False) -> Batch:
    """A batch of nothing but padding."""
    source = np.zeros((shape.rows, shape.source), np.int32)
    target = np.zeros((shape.rows, shape.target), np.int32)
    if packed:
        return Batch(source, target, target, source, source, target, target)
    return Batch(source, target, target)


def _pairs(names: Iterable[str], fields: tuple[str, str], split: str) -> Iterable[tuple[str, str]]:
    return (pair for name in names for pair in corpus.read_pairs(name, fields, split))
