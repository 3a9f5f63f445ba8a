"""Calls are timed in turns."""

from functools import partial

import pytest

from transformer_jax.benchmark import timing


def test_calls_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SAMPLE_S", 0.0)  # one call a sample
    order: list[str] = []
    timers = {name: timing.timer(partial(order.append, name)) for name in "ab"}
    times = timing.time_in_turns(timers, 3)
    assert "".join(order) == "aabb" + "ab" * 3
    assert {name: len(samples.values) for name, samples in times.items()} == {"a": 3, "b": 3}


def test_calls_that_take_long_are_timed_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    timers = {s: timing.timer(partial(wait, s)) for s in (0.01, 1.0, 1.2, 4.0)}
    times = {s: x.values for s, x in timing.time_in_turns(timers, 8, max_seconds=3.0).items()}
    assert {s: len(values) for s, values in times.items()} == {0.01: 8, 1.0: 3, 1.2: 2, 4.0: 2}
    for s, values in times.items():
        assert values == pytest.approx([s] * len(values))


def test_ratios_are_of_the_same_turn() -> None:
    fast, slow = timing.Samples((1.0, 2.0, 4.0, 8.0)), timing.Samples((2.0, 4.0, 8.0))
    assert slow.over(fast) == timing.Samples((2.0, 2.0, 2.0))
    assert fast.median == 3.0
    assert fast.quartiles == [2.0, 4.0]
