"""Translates text: tokenizes, batches by length, searches and restores the input order."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Float, Int

from transformer_jax.config import Config, DecodeConfig
from transformer_jax.data.buckets import batches_by_length
from transformer_jax.decoding.strategies import make_search
from transformer_jax.errors import UserError
from transformer_jax.models.make import abstract_params, make_model
from transformer_jax.parallel.compile import DETERMINISTIC, compile_function
from transformer_jax.parallel.kernel import shard_kernel
from transformer_jax.parallel.mesh import (
    check_mesh,
    constrain_to,
    data_parallel_size,
    make_mesh,
    shard_batch,
    take_local_rows,
)
from transformer_jax.parallel.parameters import shard_tree
from transformer_jax.runs import run
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import EOS, PAD
from transformer_jax.text.tokenizer import Tokenizers
from transformer_jax.types import Params

logger = logging.getLogger(__name__)

WINDOW = 4096
"""Number of lines that are sorted by length together. Longer input is translated in windows."""


class Hypothesis(NamedTuple):
    """A possible translation of a line."""

    text: str
    ids: tuple[int, ...]  # with the end symbol, unless truncated
    score: float  # log probability in nats over the length penalty


class Translation(NamedTuple):
    """The hypotheses for a line, best first."""

    hypotheses: tuple[Hypothesis, ...]

    @property
    def text(self) -> str:
        """The text of the best hypothesis."""
        return self.hypotheses[0].text


class Translator:
    """Translates lines of text with a trained model.

    checked: wraps the compiled function of (params, source) that searches.
    """

    def __init__(
        self,
        config: Config,
        tokenizers: Tokenizers,
        params: Params,
        mesh: Mesh | None = None,
        checked: Callable[[Any], Any] = lambda function: function,
    ) -> None:
        self.config = config
        self.tokenizers = tokenizers
        sizes = tokenizers.source.size, tokenizers.target.size
        if mesh is None:
            check_mesh(config, sizes)
            mesh = make_mesh(config.mesh)
        self.mesh = mesh
        self.params = shard_tree(params, mesh)
        kernel = shard_kernel("auto", mesh)
        self.model = make_model(config.model, *sizes, kernel, constrain_to(mesh))
        options = DETERMINISTIC if config.execution.deterministic else None
        search = make_search(self.model, config.decode)
        self._search = checked(compile_function(search, self.mesh, options=options))

    @classmethod
    def load(
        cls,
        folder: epath.PathLike,
        *,
        step: int | None = None,
        decode: DecodeConfig | None = None,
    ) -> Translator:
        """Returns the translator of a run, with its best checkpoint or that of `step`."""
        return cls.of_run(run.load(folder), step=step, decode=decode)

    @classmethod
    def of_run(
        cls, loaded: Run, *, step: int | None = None, decode: DecodeConfig | None = None
    ) -> Translator:
        """Returns the translator of a loaded run, as `load` does."""
        config = loaded.config
        if decode is not None:
            config = dataclasses.replace(config, decode=decode)
        sizes = loaded.tokenizers.source.size, loaded.tokenizers.target.size
        expected = abstract_params(config.model, *sizes)
        return cls(config, loaded.tokenizers, loaded.params(step, expected))

    def with_params(self, params: Params) -> Translator:
        """Returns a translator with other parameters that shares the compiled programs."""
        other = copy.copy(self)
        other.params = params
        return other

    def __call__(self, lines: Iterable[str]) -> list[str]:
        """Returns the translations of `lines` in order; that of a blank line is blank."""
        return [translation.text for translation in self.stream(lines)]

    def stream(
        self, lines: Iterable[str], *, n_best: int = 1, window: int = WINDOW
    ) -> Iterator[Translation]:
        """Yields the translations of `lines` in order, reading `window` lines at a time.

        Each translation has the `n_best` best hypotheses, or fewer if the search finds fewer.
        UserError: `n_best` is below 1 or above `decode.beam`.
        """
        if not 1 <= n_best <= self.config.decode.beam:
            raise UserError(
                f"n_best={n_best}: must be from 1 to decode.beam={self.config.decode.beam}"
            )
        lines = iter(lines)
        first = 1
        while group := list(itertools.islice(lines, window)):
            yield from self._translate(group, first, n_best)
            first += len(group)

    def _translate(self, lines: Sequence[str], first: int, n_best: int) -> list[Translation]:
        """Translates one window; `first` is the number of its first line, for warnings."""
        rows = [self._encode(line, first + i) for i, line in enumerate(lines)]
        results = [Translation((Hypothesis("", (), 0.0),))] * len(lines)
        decode = self.config.decode
        batches = batches_by_length(
            [len(row) for row in rows],
            decode.batch_tokens // decode.beam,
            self.config.model.max_length,
            data_parallel_size(self.mesh),
        )
        for shape, members in batches:
            source = np.full(shape, PAD, np.int32)
            for row, index in enumerate(members):
                source[row, : len(rows[index])] = rows[index]
            local = take_local_rows(source, self.mesh)
            found = self._search(self.params, shard_batch(local, self.mesh))
            ids, scores = (np.asarray(x)[:, :n_best] for x in found)
            for row, index in enumerate(members):
                results[index] = self._translation(ids[row], scores[row])
        return results

    def _translation(
        self, ids: Int[np.ndarray, "K T"], scores: Float[np.ndarray, " K"]
    ) -> Translation:
        """Returns the hypotheses of one sentence, without those that the search left empty."""
        hypotheses: list[Hypothesis] = []
        for row, score in zip(ids.tolist(), scores.tolist(), strict=True):
            if hypotheses and score == -np.inf:
                break
            end = row.index(EOS) + 1 if EOS in row else len(row)
            tokens = tuple(i for i in row[:end] if i != PAD)
            text = self.tokenizers.target.decode([i for i in tokens if i != EOS])
            hypotheses.append(Hypothesis(text, tokens, score))
        return Translation(tuple(hypotheses))

    def _encode(self, line: str, number: int) -> list[int]:
        """Returns the ids of a line with the end symbol; none for a blank line."""
        ids = self.tokenizers.source.encode(line)
        limit = self.config.model.max_length - 1
        if len(ids) > limit:
            logger.warning(
                "line %d: cut from %d to %d tokens (model.max_length=%d)",
                number,
                len(ids),
                limit,
                limit + 1,
            )
        return [*ids[:limit], EOS] if ids else []
