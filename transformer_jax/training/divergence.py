"""What is said of steps whose loss or gradient is NaN or infinite, which do not update."""

from __future__ import annotations

import math
from collections.abc import Mapping

from transformer_jax.errors import UserError


def is_finite(metrics: Mapping[str, float]) -> bool:
    """Returns whether a step has updated: its loss and the norm of its gradient are finite."""
    return math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])


def describe_skip(step: int, metrics: Mapping[str, float], batch: str, in_row: int) -> str:
    """Returns what is said of a step that is skipped, the last of `in_row` ones."""
    return (
        f"step {step}: loss={metrics['loss']} with gradient norm {metrics['grad_norm']} in {batch}:"
        f" skipped, {in_row} in a row"
    )


def diverged(
    step: int, metrics: Mapping[str, float], batch: str, in_row: int, rate: float
) -> UserError:
    """Returns the error that ends training after `in_row` consecutive skipped steps."""
    return UserError(
        f"{describe_skip(step, metrics, batch, in_row)} (train.max_skipped), with learning rate "
        f"{rate:.3g}: training has diverged; lower optimizer.learning_rate, raise optimizer.warmup "
        "or set optimizer.clip_norm"
    )
