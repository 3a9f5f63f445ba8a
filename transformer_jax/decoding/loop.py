"""Runs searches in compiled programs of few shapes."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.decoding.search import Progress
from transformer_jax.decoding.strategies import Lines, Phases, capacity
from transformer_jax.types import Params

Row = list[np.ndarray]
"""The arrays of `Hypotheses` for one sentence."""


class Loop:
    """Searches batches of lines.

    The arrays of a search are short at first, and are doubled when they are full. If `regroup`, a
    search is left when at most half of its sentences are not done. Those wait for others that are
    as far, and go on with them in a batch of the shape that both had, so that few rows of a batch
    are idle, and few shapes are compiled. Each is compiled when it is first needed, while other
    threads search.

    phases: those of the search, compiled. threads: number of batches that are searched at a time.
    regroup: needs one device.
    """

    def __init__(self, phases: Phases, *, threads: int, regroup: bool) -> None:
        self.phases = Phases(*map(_compiled_once, phases))
        self.threads, self.regroup = threads, regroup

    def __call__(
        self,
        params: Sequence[Params],
        batches: Sequence[Lines],
        done: Callable[[int, int], None] = lambda batch, row: None,
    ) -> list[list[Row]]:
        """Returns the hypotheses of each line of each batch.

        done: called with the batch and the row of each line once it is done, by one thread at a
        time.
        """
        work = _Work(self, params, batches, done)
        if self.threads == 1:
            work.run()
        else:
            with ThreadPoolExecutor(self.threads, "search") as pool:
                for thread in [pool.submit(work.run) for _ in range(self.threads)]:
                    thread.result()
        rows = [np.shape(lines.source)[0] for lines in batches]
        return [[work.found[i, row] for row in range(count)] for i, count in enumerate(rows)]


class _Place(NamedTuple):
    """Where a search is. Those in the same place can go on together."""

    shapes: tuple[Any, ...]  # of the lines that it began with
    position: int


class _Task(NamedTuple):
    """A search to go on with, until it is left if at most `few` of its sentences are not done."""

    place: _Place
    rows: np.ndarray  # [B, 2]: batch and row of each sentence
    progress: Progress | None  # None: it has not begun
    few: int


class _Waiting(NamedTuple):
    """Sentences that wait for others."""

    rows: np.ndarray  # [C, 2]
    arrays: list[np.ndarray]  # leaves of their search, but for its position


class _Work:
    """What is left to search, shared by the threads of a loop."""

    def __init__(
        self,
        loop: Loop,
        params: Sequence[Params],
        batches: Sequence[Lines],
        done: Callable[[int, int], None],
    ) -> None:
        self.found: dict[tuple[int, int], Row] = {}
        self._done = done
        self._loop, self._params, self._batches = loop, params, batches
        self._fresh = deque(range(len(batches)))
        self._waiting: dict[_Place, list[_Waiting]] = defaultdict(list)
        self._running: list[_Place] = []
        self._structure: Any = None  # that of the arrays of `_Waiting`
        self._changed = threading.Condition()
        self._failed = False

    def run(self) -> None:
        """Searches until nothing is left."""
        while (task := self._take()) is not None:
            left = None
            try:
                left = self._advance(task)
            except BaseException:
                self._failed = True
                raise
            finally:
                with self._changed:
                    self._running.remove(task.place)
                    if left is not None:
                        place, waiting = left
                        self._waiting[place].append(waiting)
                    self._changed.notify_all()

    def _take(self) -> _Task | None:
        """Returns the next task, once there is one; None: nothing is left."""
        with self._changed:
            while not self._failed:
                if (task := self._next()) is not None:
                    self._running.append(task.place)
                    return task
                if not self._running:
                    return None
                self._changed.wait()
            return None

    def _next(self) -> _Task | None:
        """Returns a batch of sentences that waited, if it is full or no others can join it, or a
        fresh one; None: there is none now."""
        for place, waiting in self._waiting.items():
            if sum(len(each.rows) for each in waiting) >= _rows_of(place):
                return self._together(place)
        if self._fresh:
            batch = self._fresh.popleft()
            place = _Place(_shapes(self._batches[batch]), 0)
            count = _rows_of(place)
            rows = np.stack([np.full(count, batch), np.arange(count)], axis=1)
            return _Task(place, rows, None, count // 2 if self._others(place) else 0)
        for place in sorted(self._waiting, key=lambda place: place.position):
            behind = (
                p.shapes == place.shapes and p.position < place.position for p in self._running
            )
            if not any(behind):
                return self._together(place)
        return None

    def _others(self, place: _Place) -> bool:
        """Returns whether sentences of this place may ever have others to go on with."""
        fresh = any(_shapes(self._batches[i]) == place.shapes for i in self._fresh)
        return fresh or any(p.shapes == place.shapes for p in (*self._running, *self._waiting))

    def _together(self, place: _Place) -> _Task:
        """Returns a batch of sentences that waited in a place. Rows that are missing are done."""
        count, waiting = _rows_of(place), self._waiting.pop(place)
        rows = np.concatenate([each.rows for each in waiting])
        arrays = [
            np.concatenate(leaves) for leaves in zip(*(w.arrays for w in waiting), strict=True)
        ]
        if len(rows) > count:
            self._waiting[place].append(_Waiting(rows[count:], [x[count:] for x in arrays]))
        rows, missing = rows[:count], max(count - len(rows), 0)
        arrays = [np.concatenate([x[:count], np.repeat(x[:1], missing, axis=0)]) for x in arrays]
        progress = Progress(jnp.int32(place.position), *jax.tree.unflatten(self._structure, arrays))
        progress.done[len(rows) :] = True
        few = (count if missing else count // 2) if self._others(place) else 0
        return _Task(place, rows, progress, few)

    def _advance(self, task: _Task) -> tuple[_Place, _Waiting] | None:
        """Searches a batch, and returns those of its sentences that wait then."""
        phases, progress = self._loop.phases, task.progress
        few = np.array(task.few, np.int32)
        if progress is None:
            progress = phases.start(self._params, self._batches[task.rows[0, 0]])
        while True:
            if int(progress.position) == capacity(progress):
                progress = phases.grow(progress)
            progress, done, hypotheses = phases.proceed(self._params, progress, few)
            done = np.asarray(done)[: len(task.rows)]
            arrays = [np.asarray(x) for x in hypotheses]
            with self._changed:
                for i in np.flatnonzero(done):
                    batch, row = task.rows[i].tolist()
                    if (batch, row) not in self.found:
                        self.found[batch, row] = [x[i] for x in arrays]
                        self._done(batch, row)
            if done.all():
                return None
            if self._loop.regroup:
                return self._left(task, progress, np.flatnonzero(~done))

    def _left(self, task: _Task, progress: Progress, rows: np.ndarray) -> tuple[_Place, _Waiting]:
        """Returns the sentences of some rows, as they wait, and where."""
        position, *rest = progress
        leaves, self._structure = jax.tree.flatten(tuple(rest))
        arrays = [np.asarray(leaf)[rows] for leaf in leaves]
        return task.place._replace(position=int(position)), _Waiting(task.rows[rows], arrays)


class Cancelled(Exception):
    """A search has been cancelled."""


def polled(
    function: Callable[..., Any], cancelled: Callable[[], bool] | None
) -> Callable[..., Any]:
    """Returns a compiled function that raises Cancelled instead of running if it is to."""
    if cancelled is None:
        return function

    def run(*arguments: Any) -> Any:
        if cancelled():
            raise Cancelled
        return jax.block_until_ready(function(*arguments))

    return run


def _shapes(lines: Lines) -> tuple[Any, ...]:
    return tuple(None if x is None else np.shape(x) for x in lines)


def _rows_of(place: _Place) -> int:
    """Returns the number of rows of a batch."""
    return place.shapes[0][0]


def _compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a compiled function that several threads may call.

    Of those that call it with a new shape, one compiles it and the others wait.
    """
    locks: dict[Any, threading.Lock] = {}
    known: set[Any] = set()

    def run(*arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments[1:] or arguments)
        key = tree, tuple(np.shape(leaf) for leaf in leaves)
        if key in known:
            return function(*arguments)
        with locks.setdefault(key, threading.Lock()):
            result = function(*arguments)
            known.add(key)
            return result

    return run
