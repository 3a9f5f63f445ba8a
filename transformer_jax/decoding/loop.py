"""Runs searches in compiled programs of few shapes."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from transformer_jax.decoding.scheduler import Job, Scheduler, Sentence
from transformer_jax.decoding.search import Progress
from transformer_jax.decoding.strategies import Lines, Phases, capacity
from transformer_jax.types import Params

Row = list[np.ndarray]
"""The arrays of `Hypotheses` for one sentence."""


class Cancelled(Exception):
    """The caller has cancelled a search."""


def run(loops: Sequence["Loop"]) -> list[list[list[Row]]]:
    """Runs loops at the same time, and returns the hypotheses of each line of each batch of each.

    A single loop with a single thread runs in the thread that calls. Cancelled: `Loop.cancelled`
    has returned True.
    """
    jobs = [loop.run_jobs for loop in loops for _ in range(loop.threads)]
    if len(jobs) == 1:
        jobs[0]()
        return [loops[0].results]
    pool = ThreadPoolExecutor(len(jobs), "search")
    try:
        for thread in as_completed([pool.submit(job) for job in jobs]):
            thread.result()
    finally:  # An interrupt does not wait for the programs that run, and no other begins.
        for loop in loops:
            loop.stop()
        pool.shutdown(wait=False)
    return [loop.results for loop in loops]


@dataclass
class Loop:
    """Searches batches of lines, in the order that a `Scheduler` decides.

    The arrays of a search are short at first, and are doubled when they are full. A program is
    compiled when a thread first needs it, while other threads search.
    """

    phases: Phases  # those of the search, compiled
    params: Sequence[Params]  # those of each model
    batches: Sequence[Lines]
    threads: int  # number of batches that are searched at a time; 1: in the thread that calls
    merge: bool  # whether to merge unfinished sentences of several batches; needs one device
    done: Callable[[int, int], None] = lambda batch, row: None
    """Called with the batch and the row of each line once it is done, by one thread at a time."""
    cancelled: Callable[[], bool] = lambda: False
    """Asked before each program."""
    compiled: set[Any] = field(default_factory=set)
    """Programs that earlier loops with these phases have compiled; those of this one are added."""

    def __post_init__(self) -> None:
        shapes = [tuple(jax.tree.map(np.shape, lines)) for lines in self.batches]
        self._scheduler = Scheduler(shapes, merge=self.merge)
        self._hypotheses: dict[Sentence, Row] = {}
        # For each pending sentence the arrays of those that left a search together, and its row.
        self._pending: dict[Sentence, tuple[Any, int]] = {}
        self._sharding = jax.tree.leaves(self.params)[0].sharding
        (device, *_) = self._sharding.device_set
        self._on_host = device.platform == "cpu"  # pending arrays; else on the device
        self._over = False  # a thread has failed, or the caller was interrupted
        self._compiling = 0.0  # seconds, of all threads
        self._changed = threading.Condition()  # guards all of these, and calls of `done`

    @property
    def results(self) -> list[list[Row]]:
        """The hypotheses of each line of each batch, after `run`."""
        rows = [len(lines.source) for lines in self.batches]
        return [[self._hypotheses[Sentence(i, j)] for j in range(n)] for i, n in enumerate(rows)]

    @property
    def compiling(self) -> float:
        """The seconds by which compilation has delayed the searches, which share the threads."""
        return self._compiling / min(self.threads, max(len(self.batches), 1))

    def stop(self) -> None:
        """Ends the search after the programs that run."""
        self._over = True

    def run_jobs(self) -> None:
        """Runs jobs until all sentences are done, or the search is over for another reason."""
        try:
            while (job := self._next_job()) is not None:
                self._search(job)
        finally:  # Whatever the reason, there are no more jobs.
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _next_job(self) -> Job | None:
        """Returns the next job, once there is one; None: there will be none."""
        with self._changed:
            while not (self._over or self._scheduler.is_over):
                if (job := self._scheduler.next_job()) is not None:
                    return job
                self._changed.wait()
        return None

    def _search(self, job: Job) -> None:
        """Searches a batch until it is left, and takes the results."""
        leave_at = np.array(job.leave_at, np.int32)
        self._check()
        if job.bucket.position == 0:
            lines = self.batches[job.sentences[0].batch]
            with self._timed("prefill", job.bucket.shape):
                progress = self.phases.prefill(self.params, lines)
            progress = jax.block_until_ready(progress)
        else:
            progress = self._resume(job)
        while True:
            self._check()
            if int(progress.position) == capacity(progress):
                with self._timed("grow", _program(job, progress)):
                    progress = self.phases.grow(progress)
            with self._timed("decode", _program(job, progress)):
                decoded = self.phases.decode(self.params, progress, leave_at)
            # A signal can interrupt this wait, but not the copies that follow.
            progress, done, hypotheses = jax.block_until_ready(decoded)
            # Rows that were missing in a merged batch are copies, which are of no use.
            done = np.asarray(done)[: len(job.sentences)]
            arrays = [np.asarray(x) for x in hypotheses]
            with self._changed:
                for i, sentence in enumerate(job.sentences):
                    if done[i] and sentence not in self._hypotheses:
                        self._hypotheses[sentence] = [x[i] for x in arrays]
                        self.done(*sentence)
            # What may be merged goes back to the scheduler also when only its arrays are full.
            if done.all() or self.merge:
                return self._leave(job, progress, np.flatnonzero(~done))

    @contextmanager
    def _timed(self, phase: str, program: Any) -> Iterator[None]:
        """Times the first call of a program, which compiles it."""
        began = time.perf_counter()
        yield
        with self._changed:
            if (phase, program) not in self.compiled:
                self.compiled.add((phase, program))
                self._compiling += time.perf_counter() - began

    def _check(self) -> None:
        """Cancelled: the caller has cancelled the search."""
        if self.cancelled():
            raise Cancelled

    def _leave(self, job: Job, progress: Progress, rows: np.ndarray) -> None:
        """Keeps the unfinished rows of a search, and returns its job to the scheduler."""
        sentences, position = [job.sentences[i] for i in rows], int(progress.position)
        # The position is that of the bucket. Nothing is kept if all sentences are done.
        arrays: Any = progress._replace(position=None) if sentences else None
        if self._on_host:  # where only these rows are kept
            arrays = jax.tree.map(lambda x: np.asarray(x)[rows], arrays)
            rows = np.arange(len(rows))
        with self._changed:
            kept = ((arrays, int(row)) for row in rows)
            self._pending |= dict(zip(sentences, kept, strict=True))
            self._scheduler.returned(job, position, sentences)
            self._changed.notify_all()

    def _resume(self, job: Job) -> Progress:
        """Returns the search of pending sentences; rows that are missing count as done."""
        count = len(job.sentences)
        with self._changed:
            pending = [self._pending.pop(sentence) for sentence in job.sentences]
        pending += pending[:1] * (job.bucket.rows - count)
        merged: Progress = (_merged_on_host if self._on_host else _merged_on_device)(pending)
        position, done = job.bucket.position, np.arange(job.bucket.rows) >= count
        merged = merged._replace(position=np.array(position, np.int32), done=done)
        # On the device already, so that they need no programs of their own.
        return jax.device_put(merged, self._sharding)


def _merged_on_host(pending: Sequence[tuple[Any, int]]) -> Any:
    """Returns the rows of searches as those of one."""
    parts = []
    # Sentences that were left together are taken together: one copy of each of their arrays.
    for _, group in groupby(pending, lambda each: id(each[0])):
        (arrays, *_), rows = zip(*group, strict=True)
        parts.append(jax.tree.map(lambda x, rows=list(rows): x[rows], arrays))
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def _merged_on_device(pending: Sequence[tuple[Any, int]]) -> Any:
    """Returns the same of arrays that have as many rows as the result, with a single program."""
    origins, rows = zip(*((id(arrays), row) for arrays, row in pending), strict=True)
    merged = pending[0][0]
    for origin, arrays in {id(arrays): arrays for arrays, _ in pending}.items():
        merged = _with_rows(merged, arrays, np.array(rows, np.int32), np.equal(origins, origin))
    return merged


@jax.jit
def _with_rows(merged: Any, arrays: Any, rows: Array, chosen: Array) -> Any:
    """Returns `merged` with the `rows` of other arrays where they are chosen."""

    def select(x: Array, y: Array) -> Array:
        return jnp.where(chosen.reshape(-1, *[1] * (x.ndim - 1)), y[rows], x)

    return jax.tree.map(select, merged, arrays)


def _program(job: Job, progress: Progress) -> tuple[Any, ...]:
    """Returns what the program of a phase depends on."""
    return job.bucket.shape, capacity(progress)
