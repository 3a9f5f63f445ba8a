"""Attention and its gradients by the formulas, in float64 with NumPy: what is right."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

ROWS = 1024
"""Rows of scores computed at a time, so that long sequences need little memory."""

Queries = Float[np.ndarray, "group T H"]
Keys = Float[np.ndarray, "1 S H"]


class Exact(NamedTuple):
    """The output and the gradients of query, key and value for some heads of keys."""

    heads: list[int]
    """Their indices among the B x G of the batch."""
    arrays: list[np.ndarray]
    """Four arrays [len(heads), group or 1, length, H]."""

    def error(self, results: Sequence[Any]) -> float | None:
        """Returns the largest difference of `results`, the output alone or all four arrays.

        It is relative to the largest element of each array. None: an element is not finite.
        """
        errors = [0.0]
        for true, result in zip(self.arrays, results, strict=False):
            ours = np.asarray(result).reshape(-1, *true.shape[1:])[self.heads].astype(np.float64)
            largest = np.max(np.abs(true)) or 1.0  # 0: the query's gradient with a single key
            errors.append(float(np.max(np.abs(ours - true)) / largest))
        return max(errors) if np.isfinite(errors).all() else None


def exact(
    inputs: Sequence[Any], mask: Bool[np.ndarray, "B T S"] | None = None, all_heads: bool = True
) -> Exact:
    """Returns softmax(Q Kᵀ / √H) V and the gradients of query, key and value.

    inputs: query, key, value and the output's gradient. mask: True where a query attends to a key,
    for each row of the batch or, if there is one, for all; the output of a query that attends to
    none is 0. all_heads: otherwise only the first and the last.
    """
    batch, kv_heads = inputs[1].shape[:2]
    arrays = [np.asarray(x).reshape(batch * kv_heads, -1, *x.shape[2:]) for x in inputs]
    heads = list(range(batch * kv_heads))
    heads = heads if all_heads else sorted({heads[0], heads[-1]})
    results: list[list[np.ndarray]] = []
    for head in heads:
        query, key, value, gradient = (x[head].astype(np.float64) for x in arrays)
        visible = None if mask is None else mask[head // kv_heads % len(mask)]
        results.append(_one_head(query, key, value, gradient, visible))
    return Exact(heads, [np.stack(x) for x in zip(*results, strict=True)])


def _one_head(
    query: Queries, key: Keys, value: Keys, gradient: Queries, mask: Bool[np.ndarray, "T S"] | None
) -> list[np.ndarray]:
    """Returns the output and the gradients of one head of keys and its group of queries."""
    scale = query.shape[-1] ** -0.5
    output, d_query, d_key, d_value = map(np.zeros_like, (query, query, key, value))
    size = max(1, ROWS // len(query))
    for start in range(0, query.shape[1], size):
        rows = slice(start, start + size)
        q, g = query[:, rows], gradient[:, rows]
        scores = q @ key.swapaxes(1, 2) * scale
        if mask is not None:
            scores = np.where(mask[rows], scores, -np.inf)
        # Finite limits, so that the weights of a query that attends to nothing are 0, not 0 / 0.
        weights = np.exp(scores - scores.max(-1, keepdims=True, initial=np.finfo(float).min))
        weights /= np.maximum(weights.sum(-1, keepdims=True), np.finfo(float).tiny)
        d_weights = g @ value.swapaxes(1, 2)
        d_scores = weights * (d_weights - np.sum(weights * d_weights, -1, keepdims=True)) * scale
        output[:, rows], d_query[:, rows] = weights @ value, d_scores @ key
        d_key += np.sum(d_scores.swapaxes(1, 2) @ q, axis=0)
        d_value += np.sum(weights.swapaxes(1, 2) @ g, axis=0)
    return [output, d_query, d_key, d_value]
