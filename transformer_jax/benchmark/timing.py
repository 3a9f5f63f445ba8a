"""Time things side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Name = TypeVar("Name")

SAMPLE_S = 0.05
"""A sample is of so many calls in a row that they take this long."""
LEAST = 2
"""Samples of each call, however long it takes."""


def in_turns(
    calls: Mapping[Name, Callable[[], Any]], most: int, seconds: float = math.inf
) -> dict[Name, list[float]]:
    """Seconds a call takes, in samples: at most so many, and so many seconds of each.

    All calls, which must wait for their results, take turns, so that a change of the machine's pace
    meets all alike. They run twice before, to be compiled and to be counted.
    """
    counts, samples = {}, {}
    for name, call in calls.items():
        _timed(call, 1)
        once = _timed(call, 1)
        counts[name] = max(1, round(SAMPLE_S / once))
        samples[name] = int(min(most, max(LEAST, seconds / (once * counts[name]))))
    found: dict[Name, list[float]] = {name: [] for name in calls}
    for turn in range(most):
        for name, call in calls.items():
            if turn < samples[name]:
                found[name].append(_timed(call, counts[name]))
    return found


def _timed(call: Callable[[], Any], count: int) -> float:
    """Seconds a call. Where many are timed, one comes before: idle threads wake up slowly."""
    if count > 1:
        call()
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count
