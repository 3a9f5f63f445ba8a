"""Stops training if its loss or gradient is NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Mapping

from transformer_jax.errors import UserError


def require_finite(step: int, metrics: Mapping[str, float]) -> None:
    """Checks the loss of a step and the norm of its gradient. UserError: one is not finite."""
    loss, grad_norm = metrics["loss"], metrics["grad_norm"]
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        raise UserError(
            f"step {step}: loss={loss} with gradient norm {grad_norm}: training has diverged; "
            "lower optimizer.learning_rate, raise optimizer.warmup or set optimizer.clip_norm"
        )
