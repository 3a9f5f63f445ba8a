"""Rates, means by name, and the time that is left."""

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import pytest
from common import make_batch

from transformer_jax.config import Config, OptimizerConfig, TrainConfig
from transformer_jax.data.loader import Loaded
from transformer_jax.errors import UserError
from transformer_jax.training import meter
from transformer_jax.training.meter import Meter, Sums
from transformer_jax.training.schedules import SCHEDULES, Schedule

LOADED = Loaded(make_batch([(7, 6), (3, 2)]), 8, 0, "epoch 0, chunk 0, batch 7", (2,))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of meters; the rate of the n-th update is 0.5^(n - 1)."""
    fake = Clock()
    monkeypatch.setattr(meter, "time", fake)
    halving = Schedule(lambda step, _: 0.5 ** (step - 1))
    monkeypatch.setitem(SCHEDULES, "halving", halving)
    return fake


def make_meter(
    records: list[Any], step: int = 0, seconds: float = 0.0, sums: Sums | None = None, **limits: Any
) -> Meter:
    def report(kind: str, step: int, **values: float) -> None:
        records.append({"kind": kind, "step": step, **values})

    config = Config(
        optimizer=OptimizerConfig(schedule="halving", warmup=1),
        train=TrainConfig(log_every=2, max_skipped=3, **(limits or {"steps": 10})),
    )
    return Meter(config, 5, report, step, seconds, sums)


def metrics(**values: float) -> Any:
    return {name: jnp.asarray(value) for name, value in values.items()}


def test_every_named_metric_is_averaged(clock: Clock) -> None:
    records: list[dict[str, Any]] = []
    recorder = make_meter(records)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 8.0)):
        clock.now += 2.0
        values = metrics(loss=loss, grad_norm=1.0, tokens=8, **{"decoder/0/entropy": 2 * loss})
        recorder.add(step, values, LOADED, ideal=0.75)
    recorder.finish_step()
    (record,) = records
    assert record["mfu"] == 1.5 / 6.0
    assert record["step"] == 2
    assert record["loss"] == 2.0
    assert record["decoder/0/entropy"] == 4.0
    assert record["tokens_per_s"] == 16 / 6.0  # step 2 settles while step 3 is dispatched
    assert record["target_tokens"] == 16
    assert record["lr"] == 0.5  # of the second update
    assert record["padding"] == 1 - 18 / 26
    assert "tokens" not in record


def test_rates_leave_out_compilation_and_evaluation(clock: Clock) -> None:
    records: list[dict[str, Any]] = []
    recorder = make_meter(records)
    for step in (1, 2):
        with recorder.dispatching(LOADED.batch):
            clock.now += 30.0 if step == 1 else 1.0
        recorder.add(step, metrics(loss=1.0, grad_norm=1.0, tokens=8), LOADED)
        if step == 1:
            with recorder.paused():
                clock.now += 27.0
        clock.now += 1.0
    recorder.finish_step()
    assert records[0]["tokens_per_s"] == 16 / 3.0
    assert records[0]["minutes"] == 60 / 60


def test_a_continued_run_emits_the_same_means(clock: Clock) -> None:
    """It stops between two records, after half a minute that is not its own."""
    whole, parts = [], []
    for records, stops in ((whole, False), (parts, True)):
        recorder = make_meter(records)
        for step, loss in ((1, 3.1), (2, 1.7), (3, 8.3), (4, 0.3)):
            recorder.add(step, metrics(loss=loss, grad_norm=1.0, tokens=8), LOADED, ideal=0.75)
            recorder.finish_step()
            clock.now += 2.0
            if stops and step in (1, 2):
                stored = json.loads(json.dumps(dataclasses.asdict(recorder.sums())))
                clock.now += 30.0
                recorder = make_meter(records, sums=Sums(**stored))
    assert [record["target_tokens"] for record in whole] == [16, 32]
    for record in (*whole, *parts):
        del record["minutes"], record["seconds_left"]
    assert parts == whole


def test_steps_that_are_not_finite_are_counted_up_to_a_limit(clock: Clock) -> None:
    """They are in no mean, and the schedule of learning rates does not see them."""
    records: list[dict[str, Any]] = []
    recorder, nan, inf = make_meter(records), float("nan"), float("inf")
    steps = [(1.0, 1.0), (nan, 1.0), (2.0, inf), (4.0, 1.0), (nan, nan), (nan, nan), (nan, nan)]
    with pytest.raises(UserError) as caught:
        for step, (loss, norm) in enumerate(steps, 1):
            clock.now += 1.0
            values = metrics(loss=loss, grad_norm=norm, tokens=8)
            recorder.add(step, values, LOADED)
            recorder.finish_step()
            recorder = make_meter(records, sums=recorder.sums())  # of a continued run
    assert [record["step"] for record in records] == [2, 2, 3, 4, 5, 6]
    assert records[0]["text"] == (
        "step 2: loss=nan with gradient norm 1.0 in epoch 0, chunk 0, batch 7, 2x7x6:"
        " skipped, 1 in a row"
    )
    assert (records[1]["loss"], records[1]["skipped"], records[1]["lr"]) == (1.0, 1, 1.0)
    assert records[2]["text"].endswith("2 in a row")
    assert (records[3]["loss"], records[3]["skipped"], records[3]["lr"]) == (4.0, 2, 0.5)
    assert str(caught.value) == (
        "step 7: loss=nan with gradient norm nan in epoch 0, chunk 0, batch 7, 2x7x6:"
        " skipped, 3 in a row (train.max_skipped), with learning rate 0.25: training has diverged;"
        " lower optimizer.learning_rate, raise optimizer.warmup or set optimizer.clip_norm"
    )


def test_compilation_is_no_part_of_the_time_left(clock: Clock) -> None:
    """The first of ten steps takes 60 s to compile; each step takes 1 s to run."""
    recorder = make_meter([])
    assert recorder.progress(0) == (0.0, None)
    for step, seconds in ((1, 60.0), (2, 0.0)):
        with recorder.dispatching(LOADED.batch):
            clock.now += seconds
        clock.now += 1.0
        assert recorder.progress(step) == (step / 10, pytest.approx(10 - step))
    assert recorder.seconds() == 62.0
    other = make_batch([(5, 4)] * 4)
    with recorder.dispatching(other):  # another shape, another program
        clock.now += 30.0
    clock.now += 1.0
    assert recorder.progress(3)[1] == pytest.approx(7.0)


def test_a_continued_run_estimates_from_this_process(clock: Clock) -> None:
    """Earlier processes did 30 of 100 steps in 90 s, of which 60 s were compilation."""
    recorder = make_meter([], 30, 90.0, steps=100)
    assert recorder.progress(30) == (0.3, None)
    with recorder.dispatching(LOADED.batch):
        clock.now += 60.0
    clock.now += 10.0
    assert recorder.seconds() == 160.0
    assert recorder.progress(40) == (0.4, pytest.approx(60.0))


def test_the_limit_that_comes_first_tells_what_is_done(clock: Clock) -> None:
    recorder = make_meter([], steps=100, epochs=4, minutes=2.0)
    assert recorder.progress(5)[0] == 0.25  # of 20 batches in 4 epochs
    clock.now += 60.0
    assert recorder.progress(5)[0] == 0.5
    assert make_meter([], 90, 600.0, steps=100).progress(120)[0] == 1.0
