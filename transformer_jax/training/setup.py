"""Builds everything that training needs from a config. Writes nothing into the run."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from transformer_jax.config import Config
from transformer_jax.data.buckets import Shape
from transformer_jax.data.dataset import Examples, tokenize
from transformer_jax.data.loader import Loader
from transformer_jax.data.order import describe_mixture
from transformer_jax.data.tokenizers import tokenizers_of
from transformer_jax.decoding.evaluation import bleu_metric, warn_of_unspaced
from transformer_jax.errors import UserError
from transformer_jax.models.classifier import check_labels
from transformer_jax.models.make import abstract_model, check_model, check_packing, make_model
from transformer_jax.models.parameter_paths import by_path, select, split
from transformer_jax.models.transformer import Model
from transformer_jax.parallel import mesh as meshes
from transformer_jax.parallel.compile import REPLICATED, compile_function, compile_step
from transformer_jax.parallel.model import shard_model
from transformer_jax.parallel.parameters import partition_tree, with_shardings
from transformer_jax.parallel.processes import this_process
from transformer_jax.special_ids import PAD
from transformer_jax.text.corpus import Corpora, Corpus
from transformer_jax.text.summary import summarize
from transformer_jax.text.tokenizer import Tokenizers
from transformer_jax.training.optimizer import find_optimizer, make_optimizer
from transformer_jax.training.schedules import describe_end, find_schedule
from transformer_jax.training.step import (
    LossFn,
    Metrics,
    TrainState,
    apply_gradients,
    init_state,
    loss_fn,
    summed_gradients,
    train_step,
)
from transformer_jax.types import Batch, Key, ModelOutput, Params, unconstrained


class DevSet(NamedTuple):
    """A development corpus, as ids and as text."""

    examples: Examples
    sources: list[str]
    references: list[str]


class TrainingData(NamedTuple):
    """The corpora of a config as ids, and the tokenizers that made these."""

    tokenizers: Tokenizers
    examples: Examples  # to train on
    dev: dict[str, DevSet]


@dataclass(frozen=True)
class StepSetup:
    """Everything that a training step needs but data."""

    config: Config
    model: Model
    optimizer: optax.GradientTransformation
    mesh: Any  # a `Mesh` or, for a step that can be planned but not run, an `AbstractMesh`

    @property
    def microbatches(self) -> int:
        """Their number in a step, on these devices."""
        options = self.config.optimizer
        if options.microbatch_tokens is None:
            return options.accumulate
        devices = meshes.data_parallel_size(self.mesh)
        return math.ceil(self.config.data.batch_tokens / (devices * options.microbatch_tokens))

    def describe_devices(self) -> str:
        """Returns what a step runs on, such as "8 cpu, mesh data 8; 2 microbatches a step"."""
        count = self.microbatches
        return meshes.describe(self.mesh) + (f"; {count} microbatches a step" if count > 1 else "")

    @cached_property
    def loss(self) -> LossFn:
        """The loss that training minimizes."""
        options = self.config.optimizer
        return loss_fn(self.model, options.label_smoothing, options.r_drop)

    @property
    def update(self) -> Callable[..., tuple[TrainState, Metrics]]:
        """The run's `train_step`: a pure function (state, batch, key, reduce=...)."""
        config = self.config.optimizer
        options = {"accumulate": self.microbatches, "ema": config.ema, "frozen": config.frozen}
        return partial(train_step, loss=self.loss, optimizer=self.optimizer, **options)

    def init(self, key: Key) -> TrainState:
        """Returns the state before the first update, a pure function of `key`."""
        model = self.model.clone(constrain=unconstrained, shards=1)  # a row cannot be split
        ids = jnp.full((1, 2), PAD, jnp.int32)
        initialized: Any = model.init_with_output(key, Batch(ids, ids, ids), key)
        output, variables = initialized
        return self._first_state(output, variables["params"])

    def _first_state(self, output: ModelOutput, params: Params) -> TrainState:
        # The only running mean that auxiliary losses may depend on.
        averages = {"log_likelihood": jnp.zeros(())} if output.losses else {}
        options = self.config.optimizer
        return init_state(params, self.optimizer, options.ema, averages, options.frozen)

    @cached_property
    def abstract_state(self) -> TrainState:
        """The training state with shapes, types and shardings in place of arrays."""
        model = self.model
        traced = abstract_model(model.config, model.source_vocabulary, model.target_vocabulary)
        return with_shardings(jax.eval_shape(self._first_state, *traced), self.mesh)

    def compile(self, step: Callable[..., Any], **options: Any) -> Any:
        """Returns a step, compiled with `compile_step` for the mesh, which must be of devices."""
        execution = self.config.execution
        how: Any = {"executor": execution.executor, "deterministic": execution.deterministic}
        return compile_step(step, self.mesh, **how | options)

    def compile_gradients(self) -> Any:
        """Returns the first half of `update`, compiled."""
        frozen = self.config.optimizer.frozen
        options = {"loss": self.loss, "accumulate": self.microbatches, "frozen": frozen}
        trained = partition_tree(split(self.abstract_state.params, frozen)[1], self.mesh)
        result = (trained, REPLICATED, REPLICATED)
        return self.compile(partial(summed_gradients, **options), result=result)

    def compile_apply(self) -> Any:
        """Returns the second half of `update`, compiled. It is a program of its own, since it has
        many instructions, and is the same for each shape of batch."""
        config = self.config.optimizer
        options = {"optimizer": self.optimizer, "ema": config.ema, "frozen": config.frozen}
        apply = partial(apply_gradients, **options)
        return self.compile(apply, state=self.abstract_state, executor="jit")

    def compile_init(self) -> Any:
        """Returns `init`, compiled for the mesh, which must be of devices."""
        specs = partition_tree(self.abstract_state, self.mesh)
        return compile_function(self.init, self.mesh, result=specs)


@dataclass(frozen=True)
class Setup(StepSetup):
    """Everything that training needs."""

    tokenizers: Tokenizers
    examples: Examples
    dev: dict[str, DevSet]
    loader: Loader

    def describe(self) -> list[str]:
        """Returns lines on the corpora, the batches and the devices. UserError: a corpus cannot be
        read."""
        loader, reports = self.loader, {name: dev.examples.report for name, dev in self.dev.items()}
        shapes = [f"{s.rows}x{s.source}x{s.target}" for s in loader.shapes]
        return [
            f"corpus: {self.examples.report}",
            f"batches: {loader.batches_per_epoch} an epoch, {loader.non_padding_fraction:.1%} of "
            f"slots filled, {len(shapes)} shapes (rows x source x target): {', '.join(shapes)}",
            f"devices: {self.describe_devices()}",
            "compiling: the training step, at the first batch of each shape; values follow every "
            f"{self.config.train.log_every} steps",
            *self._describe_frozen(),
            *describe_end(self.config, loader.batches_per_epoch),
            *describe_mixture(self.examples.sizes, self.config.data),
            *(f"{name}: {report}" for name, report in reports.items() if report.left_out),
            *summarize(Corpora.of(self.config.data), self.tokenizers),
        ]

    def _describe_frozen(self) -> list[str]:
        parts = split(self.abstract_state.params, self.config.optimizer.frozen)
        frozen, trained = (sum(x.size for x in jax.tree.leaves(each)) for each in parts)
        text = f"parameters: {trained:,} are trained, and {frozen:,} are frozen"
        return [text] if frozen else []


def check_config(config: Config, devices: int | None = None) -> None:
    """Checks a config against the tables of what can be chosen by name, and against the devices.

    It is called once, where a config enters: all that follows relies on it. devices: their number;
    None: those here. UserError: names that are unknown, or choices that do not go together.
    """
    check_model(config.model, config.execution.kernel)
    trainable = config.model.weights == "float32"
    config.model.require(trainable, "weights", "float32 to train; export int8 then")
    if config.data.packing:
        check_packing(config.model)
    find_optimizer(config.optimizer)
    find_schedule(config.optimizer)
    meshes.check_mesh(config)
    if config.execution.executor == "pmap" and this_process()[1] > 1:
        raise UserError(
            "execution.executor='pmap': runs in one process; use execution.executor=jit"
        )
    bleu_metric(config.train.tokenize)
    meshes.mesh_shape(config.mesh, devices or jax.device_count())
    scored = bool(config.data.dev) or not config.train.patience
    want = "None where data.dev=(): there is no score; name a development corpus"
    config.train.require(scored, "patience", want)


def prepare(config: Config, tokenizers: Tokenizers | None = None) -> Setup:
    """Checks a config, and returns everything that training it needs.

    UserError: as `check_config` and `set_up`.
    """
    check_config(config)
    return set_up(config, tokenizers)


def set_up(
    config: Config, tokenizers: Tokenizers | None = None, corpora: Corpora | None = None
) -> Setup:
    """Returns everything that training a checked config needs. Writes nothing in a run.

    The arguments are those of `load_data`. UserError: as `load_data`, `prepare_step` and `Loader`.
    """
    loaded = load_data(config, tokenizers, corpora)
    mesh = meshes.make_mesh(config.mesh)
    step = prepare_step(config, loaded.tokenizers.sizes, mesh)
    loader = Loader(loaded.examples, config, meshes.local_shard(mesh, step.microbatches))
    return Setup(config, step.model, step.optimizer, mesh, *loaded, loader)


def load_data(
    config: Config, tokenizers: Tokenizers | None = None, corpora: Corpora | None = None
) -> TrainingData:
    """Returns the corpora of a checked config as ids, from the cache if it holds them.

    tokenizers: None: they are trained, or read as the config says. corpora: those of the config, if
    the caller has them already, so that they are hashed once. UserError: input cannot be read or
    trained on.
    """
    corpora, (index, _) = corpora or Corpora.of(config.data), this_process()
    if tokenizers is None:
        tokenizers = tokenizers_of(corpora.train, config, index)
    examples = tokenize(corpora.train, tokenizers, config, filters=True, process_index=index)
    dev = {corpus.name: load_dev_set(corpus, tokenizers, config) for corpus in corpora.dev}
    for each in (examples, *(corpus.examples for corpus in dev.values())):
        check_labels(config.model, int(each.lengths.longest()[1]))
    return TrainingData(tokenizers, examples, dev)


def load_dev_set(corpus: Corpus, tokenizers: Tokenizers, config: Config) -> DevSet:
    """Returns a corpus to evaluate on. Over-long pairs, and those without a source, have no ids.

    Warns if its scores would have no meaning. UserError: it cannot be read.
    """
    pairs = list(corpus.pairs())  # read once, since the text is needed, too
    sources, references = map(list, zip(*pairs, strict=True))
    options: Any = {"filters": False, "pairs": pairs, "process_index": this_process()[0]}
    examples = tokenize([corpus], tokenizers, config, **options)
    warn_of_unspaced(corpus.name, references, config.train.tokenize)
    return DevSet(examples, sources, references)


def prepare_step(config: Config, vocabularies: tuple[int, int], mesh: meshes.AnyMesh) -> StepSetup:
    """Returns what a training step of a checked config needs.

    vocabularies: the numbers of source and target ids. mesh: of devices, or an abstract one, for
    which the step can be planned but not run. UserError: the mesh cannot split the vocabularies, or
    `optimizer.frozen` matches no parameter or all of them.
    """
    meshes.check_mesh(config, vocabularies)
    execution = config.execution
    model = make_model(config.model, *vocabularies, kernel=execution.kernel, remat=execution.remat)
    if execution.executor == "jit":  # arrays inside a pmap are those of one device
        model = shard_model(model, mesh)
    _, params = abstract_model(config.model, *vocabularies)
    if frozen := config.optimizer.frozen:
        select(frozen, by_path(params), "optimizer.frozen")
    optimizer = make_optimizer(config, split(params, frozen)[1])
    return StepSetup(config, model, optimizer, mesh)


def abstract_batch(shape: Shape, packed: bool = False) -> Batch:
    """Returns the shapes and types of the arrays of a batch, whose sizes may be symbolic."""
    source = jax.ShapeDtypeStruct((shape.rows, shape.source), jnp.int32)
    target = jax.ShapeDtypeStruct((shape.rows, shape.target), jnp.int32)
    more = (source, source, target, target) if packed else ()
    return Batch(source, target, target, *more)
