"""Text to text: ids, batches of a few shapes sorted by length, search, text in the given order."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from transformer_jax import parallel, run
from transformer_jax.config import Config, DecodeConfig
from transformer_jax.decode import (
    Hypotheses,
    beam_search,
    gnmt_penalty,
    greedy,
    power_penalty,
)
from transformer_jax.model import Transformer, abstract_params, make_model
from transformer_jax.tokenizer import EOS, Tokenizers
from transformer_jax.types import Params

logger = logging.getLogger(__name__)

WINDOW = 4096
"""Lines that are sorted by length together; a longer input is translated window by window."""


class Translator:
    """Translates lines of text with a model's weights."""

    def __init__(
        self,
        config: Config,
        tokenizers: Tokenizers,
        weights: Params,
        mesh: Mesh | None = None,
    ) -> None:
        self.config = config
        self.tokenizers = tokenizers
        self.mesh = mesh or parallel.make_mesh()
        self.weights = parallel.replicate(weights, self.mesh)
        self.model = make_model(config.model, tokenizers.source.size, tokenizers.target.size)
        self._search = parallel.compile(make_search(self.model, config.decode), self.mesh)

    @classmethod
    def load(
        cls, folder: str | Path, *, step: int | None = None, decode: DecodeConfig | None = None
    ) -> Translator:
        """The translator of a run, with its best checkpoint or that of `step`."""
        loaded = run.load(Path(folder))
        config = loaded.config
        if decode is not None:
            config = dataclasses.replace(config, decode=decode)
        sizes = loaded.tokenizers.source.size, loaded.tokenizers.target.size
        expected = abstract_params(make_model(config.model, *sizes))
        return cls(config, loaded.tokenizers, loaded.weights(step, expected))

    def with_weights(self, weights: Params) -> Translator:
        """The same translator, and its compiled programs, with other weights."""
        other = copy.copy(self)
        other.weights = weights
        return other

    def __call__(self, lines: Iterable[str]) -> list[str]:
        """The translations of `lines`, in their order; a blank line gives a blank line."""
        return list(self.stream(lines))

    def stream(self, lines: Iterable[str], window: int | None = None) -> Iterator[str]:
        """Translates as it reads, `window` lines at a time (None: `WINDOW`)."""
        lines, window = iter(lines), window or WINDOW
        first = 1
        while group := list(itertools.islice(lines, window)):
            yield from self._translate(group, first)
            first += len(group)

    def _translate(self, lines: Sequence[str], first: int) -> list[str]:
        """Translates one window; `first` is the number of its first line, for warnings."""
        rows = [self._encode(line, first + i) for i, line in enumerate(lines)]
        results = [""] * len(lines)
        for shape, members in self._batches([len(row) for row in rows]):
            source = np.zeros(shape, np.int32)
            for row, index in enumerate(members):
                source[row, : len(rows[index])] = rows[index]
            found = self._search(self.weights, parallel.put(source, self.mesh))
            best = np.asarray(found.ids)[:, 0]
            for row, index in enumerate(members):
                ids = best[row].tolist()
                ids = ids[: ids.index(EOS)] if EOS in ids else [i for i in ids if i]
                results[index] = self.tokenizers.target.decode(ids)
        return results

    def _encode(self, line: str, number: int) -> list[int]:
        """The line's ids with the end symbol; none for a blank line."""
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

    def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[tuple[int, int], list[int]]]:
        """Shapes and members of batches: of like lengths, few shapes, no blank lines."""
        order = sorted((n, i) for i, n in enumerate(lengths) if n)
        for width, group in itertools.groupby(order, lambda item: self._width(item[0])):
            members = [i for _, i in group]
            budget = self.config.decode.batch_tokens // (width * self.config.decode.beam)
            full = 1 << max(budget.bit_length() - 1, 0)
            for start in range(0, len(members), full):
                part = members[start : start + full]
                rows = min(full, _power_of_four(len(part)))
                devices = self.mesh.devices.size
                yield (-(-rows // devices) * devices, width), part

    def _width(self, length: int) -> int:
        """Sentences are padded to one of some ten widths."""
        width = 8
        while width < length:
            width += 8 if width < 48 else width // 2
        return min(width, self.config.model.max_length)


def make_search(model: Transformer, config: DecodeConfig) -> Any:
    """A pure function (params, source [B, S]) -> Hypotheses; jit it."""

    def search(params: Params, source: Int[Array, "B S"]) -> Hypotheses:
        variables = {"params": params}
        max_length = _output_limit(model, source.shape[1])
        tokens = jnp.sum(source != 0, axis=1)
        lengths = jnp.where(tokens > 0, jnp.minimum(_output_limit(model, tokens), max_length), 0)
        state: Any = model.apply(variables, source, config.beam, max_length, method="start")

        def step(ids: Array, state: Any, index: Array) -> Any:
            return model.apply(variables, ids, state, index, method="step")

        limits: dict[str, Any] = {
            "lengths": lengths,
            "max_length": max_length,
            "start_id": model.config.decoder_start_id,
            "end_id": EOS,
            "penalty": {"gnmt": gnmt_penalty, "power": power_penalty}[config.penalty](config.alpha),
        }
        if config.beam == 1:
            return greedy(step, state, **limits)
        return beam_search(step, state, beams=config.beam, **limits)

    return search


def _output_limit(model: Transformer, length: Any) -> Any:
    """The longest output for a source of `length` tokens: twice as long and ten more."""
    limit = 2 * length + 10
    most = model.config.max_length
    return min(limit, most) if isinstance(limit, int) else jnp.minimum(limit, most)


def _power_of_four(count: int) -> int:
    """The next of 1, 4, 16, 64, ... at or above `count`: few row counts for partial batches."""
    rows = 1
    while rows < count:
        rows *= 4
    return rows
