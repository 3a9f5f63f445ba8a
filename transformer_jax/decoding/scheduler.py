"""Decides which sentences are searched together, and when: no thread, no lock and no array.

A batch is searched until few of its sentences are unfinished; rows would be idle otherwise. These
are then pending. They go on in a merged batch, together with others that have got as far in a batch
of the same shape, so that few shapes are compiled.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

Shape = tuple[Any, ...]
"""The shapes of the arrays of a batch; the first one is that of the source, [B, S]."""


class Sentence(NamedTuple):
    """A row of a batch that is to be searched."""

    batch: int
    row: int


class Bucket(NamedTuple):
    """Searches that can be merged: those of one shape, at one position."""

    shape: Shape
    position: int

    @property
    def rows(self) -> int:
        """The number of rows of its batches."""
        return self.shape[0][0]


class Job(NamedTuple):
    """A batch to search."""

    bucket: Bucket  # where the search begins or goes on; at position 0 it begins
    sentences: list[Sentence]  # at most one for each row
    leave_at: int  # the search is left when at most this many sentences are unfinished


class Scheduler:
    """Hands out jobs for batches of these shapes, and takes back what they leave unfinished.

    merge: whether searches may be left and merged; otherwise each is run to its end.
    """

    def __init__(self, shapes: Sequence[Shape], *, merge: bool) -> None:
        self._shapes, self._merge = shapes, merge
        self._fresh = deque(range(len(shapes)))
        self._pending: dict[Bucket, list[Sentence]] = {}
        self._running: list[Bucket] = []

    @property
    def is_over(self) -> bool:
        """Whether all sentences are done."""
        return not (self._fresh or self._pending or self._running)

    def next_job(self) -> Job | None:
        """Returns a job to run now; None: there is none before a running one is returned.

        The order keeps batches full. Pending sentences go on as soon as they fill a batch, so that
        their arrays are freed. Otherwise fresh batches come first, since these may leave others
        that can be merged. In the end partial batches go on, the earliest position first, unless a
        running job may still leave sentences that would join them.
        """
        full = (b for b, sentences in self._pending.items() if len(sentences) >= b.rows)
        if (bucket := next(full, None)) is not None:
            job = self._merged(bucket)
        elif self._fresh:
            job = self._begun(self._fresh.popleft())
        elif (bucket := self._earliest()) is not None:
            job = self._merged(bucket)
        else:
            return None
        self._running.append(job.bucket)
        return job

    def returned(self, job: Job, position: int, unfinished: Sequence[Sentence]) -> None:
        """Takes back a job that was left at a position."""
        self._running.remove(job.bucket)
        if unfinished:
            bucket = job.bucket._replace(position=position)
            self._pending.setdefault(bucket, []).extend(unfinished)

    def _begun(self, batch: int) -> Job:
        """Returns the job that begins the search of a batch."""
        bucket = Bucket(self._shapes[batch], 0)
        sentences = [Sentence(batch, row) for row in range(bucket.rows)]
        return Job(bucket, sentences, bucket.rows // 2 if self._has_partners(bucket.shape) else 0)

    def _merged(self, bucket: Bucket) -> Job:
        """Returns the job of the pending sentences that have waited longest in a bucket."""
        pending, rows = self._pending.pop(bucket), bucket.rows
        if pending[rows:]:
            self._pending[bucket] = pending[rows:]
        # A partial batch is left as soon as possible: others may have got as far by then.
        leave_at = rows if len(pending) < rows else rows // 2
        leave_at = leave_at if self._has_partners(bucket.shape) else 0
        return Job(bucket, pending[:rows], leave_at)

    def _earliest(self) -> Bucket | None:
        """Returns the pending bucket of the least position that no running job can still reach."""

        def in_reach(b: Bucket) -> bool:
            return any(r.shape == b.shape and r.position < b.position for r in self._running)

        waiting = (bucket for bucket in self._pending if not in_reach(bucket))
        return min(waiting, key=lambda bucket: bucket.position, default=None)

    def _has_partners(self, shape: Shape) -> bool:
        """Returns whether other sentences in batches of this shape may come to be merged with."""
        others = [bucket.shape for bucket in (*self._pending, *self._running)]
        return self._merge and shape in others + [self._shapes[i] for i in self._fresh]
