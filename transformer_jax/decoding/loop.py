"""Runs searches in compiled programs of few shapes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from transformer_jax.decoding.strategies import Lines, Phases, few
from transformer_jax.types import Params

Row = list[np.ndarray]
"""The arrays of `Hypotheses` for one sentence."""


class Loop:
    """Searches batches of lines. Several threads may call it, each with a batch of its own.

    The arrays of a search are short at first, and it leaves its loop to double them when they are
    full, and to drop the sentences that are done when at most a quarter is not. Each shape is
    compiled when it is first needed, while other threads search.

    phases: those of the search, compiled. gather: whether sentences that are done are dropped.
    """

    def __init__(self, phases: Phases, *, gather: bool) -> None:
        self._start, self._proceed, self._grow, self._unfinished = map(_compiled_once, phases)
        self._gather = gather

    def __call__(self, params: Sequence[Params], lines: Lines) -> list[Row]:
        """Returns the hypotheses of each line."""
        progress = self._start(params, lines)
        rows, found = np.arange(lines.source.shape[0]), dict[int, Row]()
        while rows.size:
            progress, full, done, hypotheses = self._proceed(params, progress)
            done, hypotheses = np.asarray(done), [np.asarray(x) for x in hypotheses]
            found |= {row: [x[i] for x in hypotheses] for i, row in enumerate(rows) if done[i]}
            if done.all():
                break
            if self._gather and np.sum(~done) <= few(rows.size):
                progress, chosen = self._unfinished(progress)
                rows = rows[np.asarray(chosen)]
            if full:
                progress = self._grow(progress)
        return [found[row] for row in range(lines.source.shape[0])]


def _compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a compiled function that several threads may call.

    Of those that call it with a new shape, one compiles it and the others wait.
    """
    locks: dict[Any, threading.Lock] = {}
    known: set[Any] = set()

    def run(*arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments[-1])
        key = tree, tuple(np.shape(leaf) for leaf in leaves)
        if key in known:
            return function(*arguments)
        with locks.setdefault(key, threading.Lock()):
            result = function(*arguments)
            known.add(key)
            return result

    return run
