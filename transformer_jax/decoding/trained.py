"""A trained model, or an ensemble of several, with what translating and scoring have in common."""

import copy
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Int

from transformer_jax.config import Config, DecodeConfig, ModelConfig
from transformer_jax.data.buckets import batches_by_length
from transformer_jax.errors import UserError
from transformer_jax.models.make import abstract_params, make_model
from transformer_jax.models.transformer import Model
from transformer_jax.parallel import mesh as meshes
from transformer_jax.parallel.model import shard_kernel
from transformer_jax.parallel.parameters import shard_tree
from transformer_jax.runs import run
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import EOS, PAD
from transformer_jax.text.tokenizer import Tokenizers
from transformer_jax.types import Params

logger = logging.getLogger(__name__)

Trained = TypeVar("Trained", bound="TrainedModel")


class Member(NamedTuple):
    """A further model of an ensemble."""

    config: ModelConfig
    params: Params


class TrainedModel:
    """A trained model with its tokenizers, on a mesh of devices.

    others: the other models of an ensemble, with the same tokenizers.
    """

    steps: tuple[int, ...] = ()
    """The checkpoints that were loaded, one of each run; none, if the parameters were given."""

    def __init__(
        self,
        config: Config,
        tokenizers: Tokenizers,
        params: Params,
        mesh: Mesh | None = None,
        others: Sequence[Member] = (),
    ) -> None:
        sizes = tokenizers.sizes
        if mesh is None:
            meshes.check_mesh(config, sizes)
            mesh = meshes.make_mesh(config.mesh)
        self.config, self.tokenizers, self.mesh = config, tokenizers, mesh
        self.params = shard_tree(params, mesh)
        self._others = tuple(shard_tree(member.params, mesh) for member in others)
        options = shard_kernel("auto", mesh), meshes.constrain_to(mesh)
        configs = config.model, *(member.config for member in others)
        self.models: tuple[Model, ...] = tuple(make_model(c, *sizes, *options) for c in configs)

    @classmethod
    def load(
        cls: type[Trained],
        folder: epath.PathLike | Run,
        *others: epath.PathLike | Run,
        step: int | None = None,
        decode: DecodeConfig | None = None,
        **options: Any,
    ) -> Trained:
        """Loads a run, with its best checkpoint or that of `step`.

        With `others`, the probabilities of all runs are averaged, with the search of the first. A
        run that is loaded already may be given instead of its folder. UserError: the tokenizers of
        the runs are not the same.
        """
        runs = [each if isinstance(each, Run) else run.load(each) for each in (folder, *others)]
        first, config = runs[0], runs[0].config
        if decode is not None:
            config = dataclasses.replace(config, decode=decode)
        for other in runs[1:]:
            _require_same_ids(first, other)
        steps = [first.best_step() if step is None else step, *(r.best_step() for r in runs[1:])]
        sizes = first.tokenizers.sizes
        models = []
        for each, chosen in zip(runs, steps, strict=True):
            like = abstract_params(each.config.model, *sizes)
            models.append(Member(each.config.model, each.params(chosen, like)))
        trained = cls(config, first.tokenizers, models[0].params, others=models[1:], **options)
        trained.steps = tuple(steps)
        return trained

    @property
    def model(self) -> Model:
        """The model, or the first one of an ensemble."""
        return self.models[0]

    @property
    def all_params(self) -> tuple[Params, ...]:
        """The parameters of each model."""
        return (self.params, *self._others)

    @property
    def max_length(self) -> int:
        """Largest number of ids of a line, end symbol included."""
        return min(model.config.max_length for model in self.models)

    @property
    def max_targets(self) -> int:
        """Largest number of ids of a target, end symbol included."""
        return min(model.config.max_targets for model in self.models)

    def with_params(self: Trained, params: Params) -> Trained:
        """Returns the same with other parameters, which shares the compiled programs."""
        other = copy.copy(self)
        other.params, other.steps = params, ()
        return other

    def encode(self, line: str, number: int | None = None) -> list[int]:
        """Returns the ids of a source with the end symbol, cut to the greatest length; none for a
        blank line.

        number: that of the line, to warn that it is cut; None: without a warning.
        """
        ids = self.tokenizers.source.encode(line)
        limit = self.max_length - 1
        if len(ids) > limit and number is not None:
            numbers = number, len(ids), limit, limit + 1
            logger.warning("line %d: cut from %d to %d tokens (model.max_length=%d)", *numbers)
        return [*ids[:limit], EOS] if ids else []

    def encode_pair(self, source: str, target: str) -> tuple[list[int], list[int]]:
        """Returns the ids of a pair with end symbols; none for two blank lines.

        UserError: a side is too long for the model, or the source alone is blank.
        """
        ids, targets = self.tokenizers.source.encode(source), self.tokenizers.target.encode(target)
        limits = ("source", ids, self.max_length), ("target", targets, self.max_targets)
        for name, row, limit in limits:
            if len(row) >= limit:
                raise UserError(f"its {name} has {len(row)} tokens; must be at most {limit - 1}")
        if targets and not ids:
            raise UserError("has a target, but a blank source; give both")
        return ([*ids, EOS], [*targets, EOS]) if ids else ([], [])

    def batches(
        self, lengths: Sequence[int], batch_tokens: int, *, shared: bool = True
    ) -> Iterator[tuple[tuple[int, int], list[int]]]:
        """Yields the shapes and the members of batches of rows of these lengths.

        shared: whether the devices share each batch.
        """
        devices = meshes.data_parallel_size(self.mesh) if shared else 1
        return batches_by_length(lengths, batch_tokens, self.max_length, devices)

    def on_mesh(self, arrays: Any) -> Any:
        """Returns a batch on the devices, split by rows."""
        return meshes.shard_batch(meshes.take_local_rows(arrays, self.mesh), self.mesh)


def padded(rows: Sequence[Sequence[int]], shape: tuple[int, int]) -> Int[np.ndarray, "B S"]:
    """Returns the rows in an array of this shape, with `PAD` after them."""
    array = np.full(shape, PAD, np.int32)
    for i, row in enumerate(rows):
        array[i, : len(row)] = row
    return array


def _require_same_ids(first: Run, other: Run) -> None:
    for side in ("source", "target"):
        digests = {getattr(loaded.tokenizers, side).digest for loaded in (first, other)}
        if len(digests) > 1:
            wanted = f"{first.folder}; the runs of an ensemble must share their tokenizers"
            raise UserError(f"run {other.folder}: its {side} vocabulary is not that of {wanted}")
