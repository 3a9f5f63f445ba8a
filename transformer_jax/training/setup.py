"""Builds everything that training needs from a config. Writes nothing into the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from transformer_jax.attention import AnyKernel
from transformer_jax.config import Config
from transformer_jax.data import loader as data
from transformer_jax.data.buckets import Shape
from transformer_jax.data.dataset import Examples, tokenize
from transformer_jax.data.order import LATEST
from transformer_jax.data.tokenizers import tokenizers_of
from transformer_jax.errors import UserError
from transformer_jax.models.checks import check_model, check_packing
from transformer_jax.models.classifier import check_labels
from transformer_jax.models.make import abstract_model, make_model
from transformer_jax.models.transformer import Model
from transformer_jax.parallel.kernel import shard_kernel
from transformer_jax.parallel.mesh import (
    AnyMesh,
    check_mesh,
    constrain_to,
    data_parallel_size,
    describe,
    local_rows,
    make_mesh,
    mesh_shape,
)
from transformer_jax.parallel.parameters import with_shardings
from transformer_jax.parallel.processes import gather, this_process
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import PAD
from transformer_jax.text.corpus import Corpora
from transformer_jax.text.tokenizer import Tokenizers
from transformer_jax.training.losses import auxiliary_losses, symmetric_divergence, token_loss
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.schedules import find_schedule
from transformer_jax.training.step import (
    Averages,
    LossFn,
    LossSums,
    Metrics,
    TrainState,
    init_state,
    train_step,
)
from transformer_jax.types import Batch, Key, ModelOutput, Params, unconstrained


@dataclass(frozen=True)
class DevSet:
    """A development corpus, as ids and as text."""

    examples: Examples
    sources: list[str]
    references: list[str]


@dataclass(frozen=True)
class StepSetup:
    """Everything that a training step needs but data."""

    config: Config
    model: Model
    optimizer: optax.GradientTransformation
    mesh: AnyMesh

    @property
    def accumulate(self) -> int:
        """The number of microbatches of a step, on these devices."""
        options = self.config.optimizer
        if options.microbatch_tokens is None:
            return options.accumulate
        devices = data_parallel_size(self.mesh)
        return math.ceil(self.config.data.batch_tokens / (devices * options.microbatch_tokens))

    def describe_devices(self) -> str:
        """Returns what a step runs on, such as "8 cpu, mesh data 8; 2 microbatches a step"."""
        count = self.accumulate
        return describe(self.mesh) + (f"; {count} microbatches a step" if count > 1 else "")

    @cached_property
    def abstract_state(self) -> TrainState:
        """The training state with shapes, types and shardings in place of arrays."""
        model = self.model
        made = abstract_model(model.config, model.source_vocabulary, model.target_vocabulary)
        state = jax.eval_shape(partial(_first_state, self), *made)
        return with_shardings(state, self.mesh)


@dataclass(frozen=True)
class Setup(StepSetup):
    """Everything that training needs."""

    mesh: Mesh
    tokenizers: Tokenizers
    examples: Examples
    dev: dict[str, DevSet]
    loader: data.Loader


def check_config(config: Config, devices: int | None = None) -> None:
    """Checks a config against the tables of kinds, scores, kernels and schedules, and the devices.

    devices: their number; None: those here. UserError: names that are unknown, or choices that do
    not go together.
    """
    check_model(config.model, config.execution.kernel)
    if config.model.weights != "float32":
        raise UserError(
            f"model.weights={config.model.weights!r}: must be float32 to train; export int8 then"
        )
    if config.data.packing:
        check_packing(config.model)
    find_schedule(config.optimizer)
    check_mesh(config)
    if config.execution.executor == "pmap" and this_process()[1] > 1:
        raise UserError(
            "execution.executor='pmap': runs in one process; use execution.executor=jit"
        )
    mesh_shape(config.mesh, devices or jax.device_count())


def prepare(
    config: Config,
    known: Run | None = None,
    corpora: Corpora | None = None,
    order: int = LATEST,
) -> Setup:
    """Returns everything that training `config` needs. Writes nothing in a run.

    known: a run whose tokenizers to use; None: they are trained. corpora: those of the config, if
    the caller has them already, so that they are hashed once. order: version of the order of the
    pairs. UserError: as `check_config`, or input that cannot be read or trained on.
    """
    check_config(config)
    mesh = make_mesh(config.mesh)
    options = config.data
    corpora = corpora or Corpora.of(options)
    process_index, _ = this_process()
    if known is None:
        tokenizers = tokenizers_of(corpora.train, config, process_index)
    else:
        tokenizers = known.tokenizers
    to_ids = partial(
        tokenize,
        tokenizers=tokenizers,
        config=options,
        max_length=config.model.max_length,
        process_index=process_index,
    )
    examples = to_ids(corpora.train, filters=True)
    dev: dict[str, DevSet] = {}
    for corpus in corpora.dev:
        pairs = list(corpus.pairs())
        sources, references = map(list, zip(*pairs, strict=True))
        ids = to_ids([corpus], filters=False, pairs=pairs)
        dev[corpus.name] = DevSet(ids, sources, references)
    for found in (examples, *(some.examples for some in dev.values())):
        check_labels(config.model, int(found.lengths.longest()[1]))
    sizes = tokenizers.source.size, tokenizers.target.size
    step = prepare_step(config, sizes, mesh)
    loader = data.Loader(
        examples,
        options,
        seed=config.train.seed,
        sampling=config.tokenizer.sampling,
        order=order,
        decoder_start_id=config.model.decoder_start_id,
        devices=data_parallel_size(mesh) * step.accumulate,
        parts=local_rows(mesh),
        share=this_process(),
        gather=gather,
    )
    return Setup(config, step.model, step.optimizer, mesh, tokenizers, examples, dev, loader)


def prepare_step(config: Config, vocabularies: tuple[int, int], mesh: AnyMesh) -> StepSetup:
    """Returns what a training step of `config` needs.

    vocabularies: the numbers of source and target ids. mesh: of devices, or an abstract one, for
    which the step can be planned but not run. UserError: as `check_mesh`.
    """
    check_mesh(config, vocabularies)
    optimizer = make_optimizer(config.optimizer, config.model.d_model)
    kernel: AnyKernel = config.execution.kernel
    constrain, shards = unconstrained, 1
    if config.execution.executor == "jit":  # arrays inside a pmap are those of one device
        kernel, constrain = shard_kernel(kernel, mesh), constrain_to(mesh)
        shards = data_parallel_size(mesh)
    remat = config.execution.remat
    model = make_model(config.model, *vocabularies, kernel, constrain, remat, shards)
    return StepSetup(config, model, optimizer, mesh)


def loss_fn(model: Model, smoothing: float, r_drop: float = 0.0) -> LossFn:
    """Returns the loss function of a model for `train_step` and `eval_step`.

    r_drop: weight α of R-Drop (Liang et al. 2021, formula 4), which has no effect in evaluation.
    Each pair then has two rows, and its target tokens count twice.
    """

    def loss(
        params: Params, batch: Batch, key: Key | None, averages: Averages
    ) -> tuple[Array, LossSums]:
        twice = bool(r_drop) and key is not None
        if twice:  # adjacent rows stay on one device
            batch = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), batch)
        output: Any = model.apply({"params": params}, batch, key)
        total, count = token_loss(output.logits, batch.target_out, smoothing)
        if twice:
            total += r_drop / 2 * symmetric_divergence(output.logits, batch.target_out)
        auxiliary, metrics = auxiliary_losses(output, batch.target_out, averages)
        return total + auxiliary, LossSums(count, output.metrics | metrics)

    return loss


def init_fn(setup: StepSetup) -> Callable[[Key, Batch], TrainState]:
    """Returns a pure function (key, batch) -> the state before the first update."""

    def init(key: Key, batch: Batch) -> TrainState:
        made: Any = setup.model.init_with_output(key, batch, key)
        output, variables = made
        return _first_state(setup, output, variables["params"])

    return init


def _first_state(setup: StepSetup, output: ModelOutput, params: Params) -> TrainState:
    # The only running mean that auxiliary losses may depend on.
    averages = {"log_likelihood": jnp.zeros(())} if output.losses else {}
    return init_state(params, setup.optimizer, setup.config.optimizer.ema, averages)


def update_fn(setup: StepSetup) -> Callable[..., tuple[TrainState, Metrics]]:
    """Returns the run's `train_step`: a pure function (state, batch, key, reduce=...)."""
    options = setup.config.optimizer
    return partial(
        train_step,
        loss=loss_fn(setup.model, options.label_smoothing, options.r_drop),
        optimizer=setup.optimizer,
        accumulate=setup.accumulate,
        ema=options.ema,
    )


def empty_batch(shape: Shape, packed: bool = False) -> Batch:
    """Returns a batch that consists of padding."""
    source = np.full((shape.rows, shape.source), PAD, np.int32)
    target = np.full((shape.rows, shape.target), PAD, np.int32)
    if packed:
        return Batch(source, target, target, source, source, target, target)
    return Batch(source, target, target)
