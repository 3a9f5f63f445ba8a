"""Gathers each query's window of keys for local attention, at a cost set by the window alone.

Predicted positions may lie anywhere, so that neighboring queries do not share blocks of keys as in
blockwise.py. Windows are gathered for one chunk of queries at a time.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, Float, Int

from transformer_jax.attention.functional import local_p_attention

CHUNK_ELEMENTS = 2**19
"""Number of key elements gathered for a chunk of queries: 2 MB in float32, which fits a cache."""


KeysValues = tuple[Array, Array]


class _Queries(NamedTuple):
    """Arrays with one entry per query. Their first axis is the length, which is chunked."""

    query: Float[Array, "T B N H"]
    center: Float[Array, "T B N"]


class _Spans(NamedTuple):
    """Keys of each query: the sentence's first key and length, and the window's first key."""

    sentence: Int[Array, "T B N"]
    length: Int[Array, "T B N"]
    window: Int[Array, "T B N"]


def local_p_gathered(
    query: Float[Array, "B N T H"],
    keys: Float[Array, "B N S H"],
    values: Float[Array, "B N S H"],
    first: Int[Array, "#B T"],
    length: Int[Array, "#B T"],
    *,
    center: Float[Array, "B N T"],
    window: int,
    score: Partial,
) -> Float[Array, "B N T H"]:
    """Returns the context of `local_p_attention` without scoring keys outside the window.

    Each query attends to the sentence of `length` keys that starts at index `first`; `center` is a
    position in that sentence. `score` maps one query [..., 1, H] and its window [..., W, H] to
    scores [..., 1, W]. The arrays that this `Partial` holds have gradients.
    """
    width = min(2 * window + 1, keys.shape[2])
    # The first integer that is at least center - D, moved so that the window lies within the keys.
    begin = jnp.ceil(lax.stop_gradient(center) - window).astype(jnp.int32) + first[:, None]
    begin = jnp.clip(begin, 0, keys.shape[2] - width)
    first, length = (jnp.broadcast_to(x[:, None], begin.shape) for x in (first, length))
    length_first = partial(jnp.moveaxis, source=2, destination=0)
    queries = jax.tree.map(length_first, _Queries(query, center))
    spans = jax.tree.map(length_first, _Spans(first, length, begin))
    context: Any = _in_windows(score, queries, (keys, values), spans, window, width)
    return jnp.moveaxis(context, 0, 2)


def _attend(
    window: int, spans: _Spans, score: Partial, queries: _Queries, windows: tuple[Array, ...]
) -> Float[Array, "T B N H"]:
    """Returns the context of each query over the keys and values of its own window."""
    keys, values = windows
    index = spans.window[..., None] + jnp.arange(keys.shape[-2]).reshape(1, 1, 1, -1)
    position = (index - spans.sentence[..., None])[..., None, :]
    in_sentence = (position >= 0) & (position < spans.length[..., None, None])
    query, center = queries.query[..., None, :], queries.center[..., None]
    options: Any = {"window": window, "key_positions": position, "score": score}
    context, _ = local_p_attention(query, keys, values, in_sentence, center=center, **options)
    return context[..., 0, :]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _in_windows(*arguments: Any) -> Float[Array, "T B N H"]:
    return _forward(*arguments)[0]


def _forward(
    score: Partial, queries: _Queries, keys: KeysValues, spans: _Spans, window: int, width: int
) -> tuple[Array, tuple[Any, ...]]:
    def context_of(chunk: tuple[_Queries, _Spans]) -> Array:
        queries, spans = chunk
        return _attend(window, spans, score, queries, _windows(keys, spans.window, width))

    chunks = lax.map(context_of, _split((queries, spans), keys[0], width))
    return _join(chunks, queries), (score, queries, keys, spans)


def _backward(window: int, width: int, residuals: tuple[Any, ...], gradient: Array) -> tuple:
    """Returns the gradients of score, queries, keys and values. Recomputes the scores.

    JAX's derivative of a gather would allocate an array as large as the keys for each chunk. Here
    all chunks add to one such array.
    """
    score, queries, keys, spans = residuals

    def add(total: tuple[Any, Any], chunk: tuple[_Queries, _Spans, Array]) -> Any:
        d_score, d_keys = total
        queries, spans, gradient = chunk
        windows = _windows(keys, spans.window, width)
        _, back = jax.vjp(partial(_attend, window, spans), score, queries, windows)
        d_score_of_chunk, d_queries, d_windows = back(gradient)
        d_score = jax.tree.map(jnp.add, d_score, d_score_of_chunk)
        d_keys = [_add_windows(*x, spans.window) for x in zip(d_keys, d_windows, strict=True)]
        return (d_score, d_keys), d_queries

    zeros = jax.tree.map(jnp.zeros_like, score), [jnp.zeros(x.shape, jnp.float32) for x in keys]
    chunks = _split((queries, spans, gradient), keys[0], width)
    (d_score, d_keys), d_queries = lax.scan(add, zeros, chunks)
    d_keys = tuple(d.astype(x.dtype) for d, x in zip(d_keys, keys, strict=True))
    return d_score, _join(d_queries, queries), d_keys, None


_in_windows.defvjp(_forward, _backward)


def _split(arrays: Any, keys: Float[Array, "B N S H"], width: int) -> Any:
    """Returns arrays [T, ...] as [chunks, queries, ...], padded with zeros."""
    batch, heads, _, size = keys.shape
    length = jax.tree.leaves(arrays)[0].shape[0]
    chunk = min(max(CHUNK_ELEMENTS // (batch * heads * width * size), 1), length)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, -length % chunk)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, chunk, *x.shape[1:])

    return jax.tree.map(split, arrays)


def _join(chunks: Any, queries: _Queries) -> Any:
    """Returns arrays [chunks, queries, ...] as [T, ...]: the inverse of `_split`."""
    length = queries.query.shape[0]
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:length], chunks)


def _windows(arrays: KeysValues, begin: Array, width: int) -> tuple[Array, ...]:
    """Returns the `width` keys from `begin` [T, B, N] of each array: [T, B, N, W, H]."""
    index = begin[..., None] + jnp.arange(width).reshape(1, 1, 1, -1)
    take = _over_heads(lambda x, i: x[i], (0, 1), 1)
    return tuple(take(x, index) for x in arrays)


def _add_windows(total: Array, windows: Array, begin: Array) -> Array:
    """Returns `total` [B, N, S, H] with `windows` added at the keys that `_windows` reads."""
    index = begin[..., None] + jnp.arange(windows.shape[-2]).reshape(1, 1, 1, -1)
    add = _over_heads(lambda x, i, d: x.at[i].add(d.astype(x.dtype)), (0, 1, 1), 0)
    return add(total, index, windows)


def _over_heads(function: Any, axes: tuple[int, ...], out: int) -> Any:
    """Maps `function` over batch and heads: the axes `axes` and those right after them."""
    return jax.vmap(jax.vmap(function, axes, out), axes, out)
