"""Times calls in turns, so that a change of the machine's speed affects all of them alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

Name = TypeVar("Name")

Timer = Callable[[int], float]
"""Makes a call N times in a row and returns the mean seconds of one call."""

SAMPLE_S = 0.05
"""A sample repeats a call until it takes about this many seconds."""
MIN_SAMPLES = 2
"""Samples of each call, however long it takes."""


class Samples(NamedTuple):
    """One value for each turn."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Returns the median."""
        return statistics.median(self.values)

    @property
    def quartiles(self) -> list[float]:
        """Returns the lower and the upper quartile."""
        ordered, quarter = sorted(self.values), len(self.values) // 4
        return [ordered[quarter], ordered[-1 - quarter]]

    def over(self, other: Samples) -> Samples:
        """Returns the ratios to `other` turn by turn, over the turns that both have."""
        return Samples(tuple(a / b for a, b in zip(self.values, other.values, strict=False)))


def timer(call: Callable[[], Any]) -> Timer:
    """Returns a timer of a call in this process. The call must wait for its results."""
    return partial(seconds_per_call, call)


def time_in_turns(
    timers: Mapping[Name, Timer], max_samples: int, max_seconds: float = math.inf
) -> dict[Name, Samples]:
    """Returns the seconds that each call takes, sampled in turns.

    Each call is made twice before, to compile it and to decide how often a sample repeats it. It
    has at most `max_samples`, and at least `MIN_SAMPLES`; between them, no more than fit in
    `max_seconds`.
    """
    repeats: dict[Name, int] = {}
    counts: dict[Name, int] = {}
    for name, run in timers.items():
        run(1)
        once = run(1)
        repeats[name] = max(1, round(SAMPLE_S / once))
        affordable = max_seconds / (once * repeats[name])
        counts[name] = int(min(max_samples, max(MIN_SAMPLES, affordable)))
    values: dict[Name, list[float]] = {name: [] for name in timers}
    for turn in range(max_samples):
        for name, run in timers.items():
            if turn < counts[name]:
                values[name].append(run(repeats[name]))
    return {name: Samples(tuple(each)) for name, each in values.items()}


def seconds_per_call(call: Callable[[], Any], count: int) -> float:
    """Returns the mean seconds of `count` calls in a row.

    More than one are preceded by a call that is not timed, because idle threads wake up slowly.
    """
    if count > 1:
        call()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count
