"""Checks of a config, its data and code of one's own, on a small model: `transformer-jax check`.

Each check computes the same in two ways that must agree, and reports the largest difference.
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from transformer_jax.config import ROLES, Config, MeshConfig, ModelConfig
from transformer_jax.data.buckets import Plan, Shape, group, pack
from transformer_jax.data.dataset import Examples, tokenize
from transformer_jax.data.loader import make_batch
from transformer_jax.errors import UserError
from transformer_jax.models.make import check_packing
from transformer_jax.models.transformer import Model
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.runs import checkpoint
from transformer_jax.text import tokenizer
from transformer_jax.text.corpus import Corpora, Pair
from transformer_jax.text.tokenizer import Tokenizers
from transformer_jax.training import oracles
from transformer_jax.training.setup import StepSetup, check_config, prepare_step
from transformer_jax.training.trainer import train
from transformer_jax.types import Batch, Params
from transformer_jax.user_code import import_module, search_current_folder

TOKENIZED = 20_000
"""Pairs of each corpus that the tokenizer is trained on, unless the config names its models."""
PAIRS, TOKENS = 64, 24
"""Pairs of each corpus that the model is checked on, and the tokens that are kept of a sentence."""
ROWS = 8
Limits = Mapping[str, float]
"""The largest difference by type of the computation."""

LOGITS: Limits = {"float32": 1e-5, "bfloat16": 5e-2}
"""As a share of the largest logit."""
GRADIENTS: Limits = {"float32": 1e-3, "bfloat16": 0.2}
"""As shares of norms. A ReLU that is 0 but for rounding is on in one program and off in another."""
EXACT: Limits = {"float32": 0.0, "bfloat16": 0.0}


class Result(NamedTuple):
    """The outcome of a check."""

    name: str
    difference: float | None  # None: the check does not apply
    limit: float
    about: str = ""  # what has failed, or why the check does not apply

    @property
    def passed(self) -> bool:
        """Whether the difference is within the limit, or the check does not apply."""
        return self.difference is None or self.difference <= self.limit


def check(
    config: Config, tokenizers: Tokenizers | None = None, modules: Sequence[str] = ()
) -> Iterator[Result]:
    """Yields the outcome of each check of a config, on a model of the same kind that is smaller.

    tokenizers: None: they are trained on the first pairs. modules: of one's own, which have been
    imported, and which the process with several devices imports as well. UserError: as
    `check_config`, or a corpus cannot be read.
    """
    check_config(config)
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject.of(config, tokenizers, modules, Path(folder))
        for name, (function, limits) in CHECKS.items():
            try:
                difference, about = function(subject), ""
            except NotApplicable as reason:
                difference, about = None, str(reason)
            except Exception as error:  # code of one's own may raise anything
                first = next(iter(str(error).splitlines()), "")
                difference, about = np.inf, f"{type(error).__name__}: {first}"
            yield Result(name, difference, limits[config.model.dtype], about)


class NotApplicable(Exception):
    """Raised by a check of what the config does not have."""


@dataclass(frozen=True)
class Subject:
    """What is checked: a small model with random parameters, and pairs of the corpora."""

    config: Config
    tokenizers: Tokenizers
    modules: Sequence[str]
    folder: Path
    lines: Sequence[Sequence[Pair]]  # of each corpus

    @classmethod
    def of(
        cls, config: Config, tokenizers: Tokenizers | None, modules: Sequence[str], folder: Path
    ) -> "Subject":
        """Returns the subject for a config, with its files in `folder`."""
        corpora = Corpora.of(config.data).train
        lines = [list(islice(corpus.pairs(), TOKENIZED)) for corpus in corpora]
        if tokenizers is None:
            options = replace(config.tokenizer, vocabulary=min(config.tokenizer.vocabulary, 8000))
            tokenizers = tokenizer.train((pair for each in lines for pair in each), options)
        tokenizer.save(tokenizers, folder)
        models = sorted(str(path) for path in folder.glob("*.model"))  # the source's is first
        names = []
        for number, each in enumerate(lines):
            path = folder / f"{number}.tsv"
            rows = islice(filter(all, (_cut_pair(pair, tokenizers) for pair in each)), PAIRS)
            path.write_text("".join(f"{source}\t{target}\n" for source, target in rows), "utf-8")
            names.append(str(path))
        data = {"train": tuple(names), "dev": (), "cache": str(folder / "cache")}
        batches = {"batch_tokens": ROWS * 2 * TOKENS, "shapes": 1, "packed_length": 2 * TOKENS}
        small = replace(config, model=cut(config.model)).changed(
            tokenizer={"models": tuple(models), "joint": len(models) == 1},
            data=data | batches | {"max_ratio": 1000.0},
            optimizer={"accumulate": 1, "microbatch_tokens": None},
            execution={"remat": "none"},
        )
        return cls(small, tokenizers, modules, folder, lines)

    @cached_property
    def setup(self) -> StepSetup:
        """The step on one device, without dropout."""
        return _on_one_device(self.config, self.tokenizers.sizes)

    @cached_property
    def params(self) -> Params:
        """Random parameters."""
        return oracles.random_params(self.setup.model)

    @cached_property
    def examples(self) -> Examples:
        """The first pairs of the corpora, at most `ROWS`."""
        corpora = Corpora.of(self.config.data).train
        examples = tokenize(corpora, self.tokenizers, self.config, filters=True)
        return examples.take(np.arange(min(ROWS, len(examples))))

    @cached_property
    def plan(self) -> Plan:
        """The batch with a pair in each row."""
        lengths = self.examples.lengths_of(np.arange(len(self.examples)))
        return group(lengths, (Shape(ROWS, *lengths.max(axis=0).tolist()),))[0]

    @cached_property
    def batch(self) -> Batch:
        """The arrays of `plan`."""
        return self.arrays(self.plan)

    def arrays(self, plan: Plan, packed: bool = False) -> Batch:
        """Returns the arrays of a batch."""
        return make_batch(self.examples, plan, packed=packed, start_id=self.config.model.start_id)


def _on_one_device(config: Config, sizes: tuple[int, int]) -> StepSetup:
    """Returns the step on one device, without dropout."""
    rates: dict[str, Any] = dict.fromkeys(("dropout", "attention_dropout", "ffn_dropout"), 0.0)
    config = config.changed(model=rates, optimizer={"r_drop": 0.0}, execution={"executor": "jit"})
    config = replace(config, mesh=MeshConfig(data=1))
    return prepare_step(config, sizes, make_mesh(config.mesh, jax.devices()[:1]))


def _cut_pair(pair: Pair, tokenizers: Tokenizers) -> Pair:
    """Returns the beginnings of a pair of sentences, on one line."""
    sides = zip(pair, tokenizers, strict=True)
    source, target = (side.decode(side.encode(text)[:TOKENS]) for text, side in sides)
    return source.replace("\t", " "), target.replace("\t", " ")


def cut(model: ModelConfig) -> ModelConfig:
    """Returns a small model of the same kind: at most two layers and four heads of width 8."""
    encoder, decoder = (min(depth, 2) for depth in model.depths)
    heads = min(model.heads, 4)
    groups = None if model.kv_heads is None else max(heads * model.kv_heads // model.heads, 1)
    return replace(
        model,
        layers=encoder,
        decoder_layers=None if model.decoder_layers is None else decoder,
        heads=heads,
        kv_heads=groups,
        d_model=heads * min(model.head_size, 8),
        d_ff=min(model.d_ff, 64),
        max_length=max(model.max_length, 4 * TOKENS),
        **{role: _cut_layer(model, role) for role in ROLES},
    )


def _cut_layer(model: ModelConfig, role: str) -> Any:
    attention, last = getattr(model, role), min(model.depth_of(role), 2) - 1
    return replace(attention, layer=None if attention.layer is None else min(attention.layer, last))


def packing_error(subject: Subject) -> float:
    """Returns how far the logits of packed pairs are from those of a pair in each row."""
    try:
        check_packing(subject.config.model)
    except UserError as error:
        raise NotApplicable(str(error)) from error
    model, params, plan = subject.setup.model, subject.params, subject.plan
    lengths = subject.examples.lengths_of(np.arange(len(subject.examples)))
    width = 2 * int(lengths.max())
    (packed,) = pack(lengths, Shape(ROWS, width, width))
    together = oracles.logits_of(model, params, subject.arrays(packed, packed=True))
    apart, errors = oracles.logits_of(model, params, subject.batch), []
    for pair, row, (_, start) in zip(packed.pairs, packed.rows, packed.starts, strict=True):
        length = lengths[pair, 1]
        wanted = apart[plan.rows[plan.pairs == pair][0], :length]
        errors.append(oracles.relative_error(together[row, start : start + length], wanted))
    return oracles.largest(errors)


def accumulation_error(subject: Subject) -> float:
    """Returns how far the gradient of two microbatches is from that of the batch."""
    setup = subject.setup
    halves = replace(setup, config=setup.config.changed(optimizer={"accumulate": 2}))
    return oracles.step_error(setup, halves, subject.params, subject.batch)


def mesh_error(subject: Subject) -> float:
    """Returns how far the gradient on several devices is from that on one.

    Another process emulates the devices: two along each axis that the config's mesh splits.
    """
    batch = Batch(*map(np.asarray, subject.batch[:3]))
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        arguments = subject.config, subject.tokenizers.sizes, subject.modules, batch
        try:
            return pool.submit(_compare_devices, *arguments).result()
        except KeyboardInterrupt:  # leaving the block waits for the process
            for process in active_children():
                process.kill()
            raise


def _compare_devices(
    config: Config, sizes: tuple[int, int], modules: Sequence[str], batch: Batch
) -> float:
    """Returns `mesh_error` in a new process. NotApplicable: the mesh is not possible."""
    # At most two devices along each axis, and two at least.
    axes = {axis: min(getattr(config.mesh, axis), 2) for axis in ("fsdp", "tensor")}
    alone = config.mesh.data == 1 and max(axes.values()) > 1
    mesh = MeshConfig(data=1 if alone else 2, **axes)
    flags = os.environ.get("XLA_FLAGS", "")  # which may ask for another number of devices
    os.environ["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\S*", "", flags)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", mesh.data * mesh.fsdp * mesh.tensor)
    search_current_folder()
    for module in modules:
        import_module("--import", module)
    one = _on_one_device(config, sizes)
    changed = replace(one.config, execution=config.execution, mesh=mesh)
    try:
        check_config(changed)
        other = prepare_step(changed, sizes, make_mesh(mesh))
    except UserError as error:
        raise NotApplicable(str(error)) from None
    try:
        return oracles.step_error(one, other, oracles.random_params(one.model), batch)
    except Exception as error:  # which may be one that cannot be sent to the other process
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def resuming_error(subject: Subject) -> float:
    """Returns how far the state of a run that was stopped and continued is from that of one that
    never was. Dropout, sampled subwords and packing are those of the config."""
    limits: Any = {"epochs": None, "minutes": None, "patience": None, "save_every": 2}

    def state_after(name: str, steps: int) -> list[Any]:
        config = subject.config.changed(train=limits | {"steps": steps})
        config = replace(config, mesh=MeshConfig())
        folder = train(config, subject.folder / name).checkpoints
        trees = [checkpoint.restore(folder, steps, part) for part in ("weights", "training")]
        return jax.tree.leaves(trees)

    whole = state_after("whole", 4)
    state_after("stopped", 2)
    pairs = zip(whole, state_after("stopped", 4), strict=True)
    return oracles.largest(np.abs(np.subtract(a, b, dtype=np.float64)) for a, b in pairs)


def round_trip_error(subject: Subject) -> float:
    """Returns the share of lines that tokenizing changes, beyond the tokenizer's normalization."""
    if subject.config.tokenizer.kind == "word":
        raise NotApplicable("tokenizer.kind='word': words that are not in the vocabulary are lost")
    changed = total = 0
    for side, each in enumerate(subject.tokenizers):
        for pair in (pair for lines in subject.lines for pair in lines[:1000]):
            changed += each.decode(each.encode(pair[side])) != each.normalize(pair[side])
            total += 1
    return changed / total


def _of_model(compare: Callable[[Model, Params, Batch], float]) -> Callable[[Subject], float]:
    return lambda subject: compare(subject.setup.model, subject.params, subject.batch)


CHECKS: dict[str, tuple[Callable[[Subject], float], Limits]] = {
    "decoding with caches": (_of_model(oracles.decoding_error), LOGITS),
    "what positions see": (_of_model(oracles.visibility), EXACT),
    "padding": (_of_model(oracles.padding_error), LOGITS),
    "packing": (packing_error, LOGITS),
    "accumulation": (accumulation_error, GRADIENTS),
    "several devices": (mesh_error, GRADIENTS),
    "resuming": (resuming_error, EXACT),
    "tokenizing": (round_trip_error, EXACT),
}
"""What `check` compares, by name, and how far it may differ."""
