"""Attention and its gradients by the formulas, in float64, with NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROWS = 1024
"""Queries at a time, so that long sentences need little memory."""


class Exact(NamedTuple):
    """The output and the gradients of query, key and value of some heads of keys."""

    heads: list[tuple[int, int]]  # row of the batch, head of keys
    arrays: list[np.ndarray]  # four, each [len(heads), group or 1, length, H]

    def error(self, found: list[Any]) -> float | None:
        """The largest difference of `found` (the output alone, or all four), relative to the
        largest element of each array. None: something in it is not finite."""
        worst = 0.0
        for true, array in zip(self.arrays, found, strict=False):
            host, group = _on_host(array), true.shape[1]
            for (row, head), part in zip(self.heads, true, strict=True):
                ours = host[row, head * group : (head + 1) * group].astype(np.float64)
                if not np.isfinite(ours).all():
                    return None
                largest = np.max(np.abs(true)) or 1.0  # of one key, whose gradient is 0
                worst = max(worst, float(np.max(np.abs(ours - part)) / largest))
        return worst


def exact(arrays: list[jax.Array], *, causal: bool, heads: int | None = None) -> Exact:
    """softmax(Q Kᵀ / √H) V and, for the output's gradient that is the last of `arrays`, those of
    query, key and value. `heads`: of so many heads of keys, from both ends; None: of all.
    """
    batch, shared = arrays[1].shape[:2]
    group = arrays[0].shape[1] // shared
    chosen = [(row, head) for row in range(batch) for head in range(shared)]
    if heads is not None and heads < len(chosen):
        chosen = chosen[: heads // 2] + chosen[-(heads - heads // 2) :]
    host = [_on_host(array) for array in arrays]
    found: list[list[np.ndarray]] = []
    for row, head in chosen:
        own = slice(head * group, (head + 1) * group)
        q, g = (x[row, own].astype(np.float64) for x in (host[0], host[3]))
        k, v = (x[row, head].astype(np.float64) for x in (host[1], host[2]))
        found.append(_head(q, k, v, g, causal))
    return Exact(chosen, [np.stack(x) for x in zip(*found, strict=True)])


def _head(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, gradient: np.ndarray, causal: bool
) -> list[np.ndarray]:
    """Of the queries [group, T, H] of one head of keys [S, H]."""
    scale = query.shape[-1] ** -0.5
    output, d_query = np.empty_like(query), np.empty_like(query)
    d_key, d_value = np.zeros_like(key), np.zeros_like(value)
    for start in range(0, query.shape[1], ROWS):
        rows = slice(start, start + ROWS)
        for member in range(query.shape[0]):
            q, g = query[member, rows], gradient[member, rows]
            scores = q @ key.T * scale
            if causal:
                place = np.arange(start, start + len(q))
                scores[place[:, None] < np.arange(len(key))] = -np.inf
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


def _on_host(array: Any) -> np.ndarray:
    """A JAX array or a PyTorch tensor in float32."""
    if isinstance(array, jax.Array):
        return np.asarray(array.astype(jnp.float32))
    return array.float().cpu().numpy()
