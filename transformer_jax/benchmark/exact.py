"""Attention and its gradients by the formulas, in float64 with NumPy: what is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

ROWS = 1024
"""Queries computed at a time, so that long sequences need little memory."""

Queries = Float[np.ndarray, "group T H"]
Keys = Float[np.ndarray, "S H"]


class Exact(NamedTuple):
    """The output and the gradients of query, key and value for some heads of keys."""

    heads: list[tuple[int, int]]
    """Row of the batch and head of keys."""
    arrays: list[np.ndarray]
    """Four arrays [len(heads), group or 1, length, H]."""

    def error(self, results: Sequence[Any]) -> float | None:
        """Returns the largest difference of `results`, the output alone or all four arrays.

        It is relative to the largest element of each array. None: an element is not finite.
        """
        worst = 0.0
        for true, array in zip(self.arrays, results, strict=False):
            host, group = _in_float32(array), true.shape[1]
            for (row, head), expected in zip(self.heads, true, strict=True):
                found = host[row, head * group : (head + 1) * group].astype(np.float64)
                if not np.isfinite(found).all():
                    return None
                largest = np.max(np.abs(true)) or 1.0  # 0: the query's gradient with a single key
                worst = max(worst, float(np.max(np.abs(found - expected)) / largest))
        return worst


def exact(inputs: Sequence[Any], *, causal: bool, heads: int | None = None) -> Exact:
    """Returns softmax(Q Kᵀ / √H) V and the gradients of query, key and value.

    `inputs` are query, key, value and the output's gradient. `heads` limits the computation to
    that many heads of keys, from both ends.
    """
    batch, kv_heads = inputs[1].shape[:2]
    group = inputs[0].shape[1] // kv_heads
    chosen = [(row, head) for row in range(batch) for head in range(kv_heads)]
    if heads is not None and heads < len(chosen):
        chosen = chosen[: heads // 2] + chosen[-(heads - heads // 2) :]
    host = [_in_float32(array) for array in inputs]
    results: list[list[np.ndarray]] = []
    for row, head in chosen:
        own = slice(head * group, (head + 1) * group)
        q, g = (x[row, own].astype(np.float64) for x in (host[0], host[3]))
        k, v = (x[row, head].astype(np.float64) for x in (host[1], host[2]))
        results.append(_one_head(q, k, v, g, causal))
    return Exact(chosen, [np.stack(x) for x in zip(*results, strict=True)])


def _one_head(
    query: Queries, key: Keys, value: Keys, gradient: Queries, causal: bool
) -> list[np.ndarray]:
    """Returns the output and the gradients of one head of keys and its group of queries."""
    scale = query.shape[-1] ** -0.5
    output, d_query = np.empty_like(query), np.empty_like(query)
    d_key, d_value = np.zeros_like(key), np.zeros_like(value)
    for start in range(0, query.shape[1], ROWS):
        rows = slice(start, start + ROWS)
        for member in range(query.shape[0]):
            q, g = query[member, rows], gradient[member, rows]
            scores = q @ key.T * scale
            if causal:
                positions = np.arange(start, start + len(q))
                scores[positions[:, None] < np.arange(len(key))] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            output[member, rows] = weights @ value
            d_weights = g @ value.T
            mean = np.sum(weights * d_weights, axis=1, keepdims=True)
            d_scores = weights * (d_weights - mean) * scale
            d_query[member, rows] = d_scores @ key
            d_key += d_scores.T @ q
            d_value += weights.T @ g
    return [output, d_query, d_key[None], d_value[None]]


def _in_float32(array: Any) -> np.ndarray:
    """Returns an array of NumPy or JAX as NumPy's in float32."""
    return np.asarray(array.astype(np.float32))
