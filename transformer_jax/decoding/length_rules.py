"""Scores of hypotheses of different lengths.

A `LengthRule` maps the log probability of a hypothesis and its length, end symbol included, to its
score. It increases with the log probability, and for a fixed one it is monotonic in the length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

LengthRule = Callable[[Float[Array, "*B"], Float[Array, "#*B"]], Float[Array, "*B"]]


def unnormalized(log_prob: Any, length: Any) -> Any:
    """Returns the log probability."""
    del length
    return log_prob


def gnmt(alpha: float) -> LengthRule:
    """Returns the rule log p / ((5 + L) / 6)^alpha (Wu et al. 2016, eq. 14)."""
    return lambda log_prob, length: log_prob / ((5.0 + length) / 6.0) ** alpha


def power(alpha: float) -> LengthRule:
    """Returns the rule log p / L^alpha; with alpha 1, scores are mean log probabilities."""
    return lambda log_prob, length: log_prob / length**alpha


def reward(each: float) -> LengthRule:
    """Returns the rule log p + `each` · L (He et al. 2016, "Improved NMT with SMT features")."""
    return lambda log_prob, length: log_prob + each * length
