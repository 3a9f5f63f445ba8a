"""Which sentences are searched together, and when: no thread, no array, no model."""

from hypothesis import given
from hypothesis import strategies as st

from transformer_jax.decoding.scheduler import Bucket, Job, Scheduler, Sentence, Shape

WIDE, NARROW = ((4, 32), None), ((4, 8), None)
"""Shapes of batches of 4 rows."""


def begin(scheduler: Scheduler) -> Job:
    job = scheduler.next_job()
    assert job is not None
    return job


def leave(scheduler: Scheduler, job: Job, position: int, count: int) -> list[Sentence]:
    """Returns a job, whose last `count` sentences are not done."""
    unfinished = job.sentences[len(job.sentences) - count :]
    scheduler.returned(job, position, unfinished)
    return unfinished


def test_a_fresh_batch_is_left_if_its_sentences_may_join_others() -> None:
    scheduler = Scheduler([WIDE, NARROW, WIDE], merge=True)
    jobs = [begin(scheduler) for _ in range(3)]
    assert [job.bucket for job in jobs] == [Bucket(shape, 0) for shape in (WIDE, NARROW, WIDE)]
    assert jobs[2].sentences == [Sentence(2, row) for row in range(4)]
    # The second is alone in its shape; the third may still meet the first one, which runs.
    assert [job.leave_at for job in jobs] == [2, 0, 2]
    assert scheduler.next_job() is None
    assert not scheduler.is_over
    for job in jobs:
        leave(scheduler, job, 8, 0)
    assert scheduler.is_over


def test_nothing_is_left_where_nothing_may_be_merged() -> None:
    scheduler = Scheduler([WIDE, WIDE], merge=False)
    assert [begin(scheduler).leave_at for _ in range(2)] == [0, 0]


def test_pending_sentences_go_on_as_soon_as_they_fill_a_batch() -> None:
    scheduler = Scheduler([WIDE] * 4, merge=True)
    first, second = begin(scheduler), begin(scheduler)
    pending = leave(scheduler, first, 8, 2) + leave(scheduler, second, 8, 2)
    merged = begin(scheduler)
    assert merged == Job(Bucket(WIDE, 8), pending, leave_at=2)
    assert begin(scheduler).sentences[0].batch == 2  # then the fresh ones


def test_a_partial_batch_waits_for_those_that_are_behind() -> None:
    scheduler = Scheduler([WIDE, WIDE, NARROW], merge=True)
    first, second, narrow = (begin(scheduler) for _ in range(3))
    pending = leave(scheduler, first, 16, 1)
    assert scheduler.next_job() is None  # the second one is behind, at 0
    pending += leave(scheduler, second, 16, 2)
    merged = begin(scheduler)  # the narrow one, which still runs, is of another shape
    assert merged == Job(Bucket(WIDE, 16), pending, leave_at=0)
    leave(scheduler, narrow, 8, 0)
    leave(scheduler, merged, 24, 0)
    assert scheduler.is_over


@given(
    shapes=st.lists(st.sampled_from([WIDE, NARROW]), max_size=7),
    workers=st.integers(1, 3),
    merge=st.booleans(),
    data=st.data(),
)
def test_every_sentence_is_searched_to_its_end(
    shapes: list[Shape], workers: int, merge: bool, data: st.DataObject
) -> None:
    """Once at each position, whichever job is returned first. The scheduler never gets stuck."""
    scheduler = Scheduler(shapes, merge=merge)
    every = (Sentence(i, row) for i, shape in enumerate(shapes) for row in range(shape[0][0]))
    lengths = {sentence: data.draw(st.integers(0, 6)) for sentence in every}
    positions = dict.fromkeys(lengths, 0)
    running: list[Job] = []
    while not scheduler.is_over:
        if len(running) < workers and (job := scheduler.next_job()) is not None:
            assert len(job.sentences) <= job.bucket.rows
            assert all(positions[sentence] == job.bucket.position for sentence in job.sentences)
            running.append(job)
            continue
        job = running.pop(data.draw(st.integers(0, len(running) - 1)))
        position = job.bucket.position
        while True:
            position += 1
            unfinished = [each for each in job.sentences if lengths[each] > position]
            if len(unfinished) <= job.leave_at:
                break
        positions |= dict.fromkeys(job.sentences, position)
        scheduler.returned(job, position, unfinished)
    assert all(positions[each] >= length for each, length in lengths.items())
