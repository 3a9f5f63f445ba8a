"""Calls are timed in turns."""

from functools import partial

import pytest

from transformer_jax.benchmark import timing


def test_calls_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SAMPLE_S", 0.0)  # one call a sample
    order: list[str] = []
    calls = {name: partial(order.append, name) for name in "ab"}
    found = timing.in_turns(calls, 3)
    assert "".join(order) == "aabb" + "ab" * 3
    assert {name: len(samples) for name, samples in found.items()} == {"a": 3, "b": 3}


def test_calls_that_take_long_are_timed_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    calls = {s: partial(wait, s) for s in (0.01, 1.0, 1.2, 4.0)}
    found = timing.in_turns(calls, 8, seconds=3.0)
    assert {s: len(samples) for s, samples in found.items()} == {0.01: 8, 1.0: 3, 1.2: 2, 4.0: 2}
    for s, samples in found.items():
        assert samples == pytest.approx([s] * len(samples))
