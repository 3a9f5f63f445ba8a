"""Local attention whose queries take their window's keys alone: the cost follows from the window.

A predicted position may be anywhere, so that neighbouring queries share no block of keys, as they
do in blockwise.py. Each query's window is gathered instead, for a few queries at a time.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, Float, Int

from transformer_jax.attention.kinds import local_p_attention

HELD = 2**19
"""Numbers in the windows of keys that are held at once: 2 MB in float32, which caches can hold."""


class _Queries(NamedTuple):
    """What belongs to a query; lengths come first, so that the few at a time are the first axis."""

    query: Float[Array, "T B N H"]
    centre: Float[Array, "T B N"]


class _Places(NamedTuple):
    """Indices of keys: where a query's sentence and window begin; and the sentence's length."""

    first: Int[Array, "T B N"]
    length: Int[Array, "T B N"]
    window: Int[Array, "T B N"]


def local_p_gathered(
    query: Float[Array, "B N T H"],
    keys: Float[Array, "B N S H"],
    values: Float[Array, "B N S H"],
    first: Int[Array, "#B T"],
    length: Int[Array, "#B T"],
    *,
    centre: Float[Array, "B N T"],
    window: int,
    score: Partial,
) -> Float[Array, "B N T H"]:
    """The context of `kinds.local_p_attention`, without the scores of keys outside the window.

    Each query sees the sentence of `length` keys from index `first` on, and `centre` is a position
    in it. `score`: of one query and its window, [..., 1, H] and [..., W, H] to [..., 1, W]; a
    `Partial`, whose arrays have gradients.
    """
    width = min(2 * window + 1, keys.shape[2])
    # The first integer that is at least centre - D, but so that the window lies within the keys.
    begin = jnp.ceil(lax.stop_gradient(centre) - window).astype(jnp.int32) + first[:, None]
    begin = jnp.clip(begin, 0, keys.shape[2] - width)
    first, length = (jnp.broadcast_to(x[:, None], begin.shape) for x in (first, length))
    attention = partial(_attend, window)
    queries = jax.tree.map(_length_first, _Queries(query, centre))
    places = jax.tree.map(_length_first, _Places(first, length, begin))
    found: Any = _in_windows(score, queries, (keys, values), places, attention, width)
    return jnp.moveaxis(found, 0, 2)


def _length_first(x: Float[Array, "B N T *H"] | Int[Array, "B N T"]) -> Array:
    return jnp.moveaxis(x, 2, 0)


def _attend(
    window: int, score: Partial, queries: _Queries, windows: tuple[Array, Array], places: _Places
) -> Float[Array, "T B N H"]:
    """Each query and its own keys as an attention of one query."""
    keys, values = windows
    index = places.window[..., None] + jnp.arange(keys.shape[-2]).reshape(1, 1, 1, -1)
    position = (index - places.first[..., None])[..., None, :]
    seen = (position >= 0) & (position < places.length[..., None, None])
    context, _ = local_p_attention(
        queries.query[..., None, :],
        keys,
        values,
        seen,
        centre=queries.centre[..., None],
        window=window,
        key_positions=position,
        score=score,
    )
    return context[..., 0, :]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _in_windows(
    score: Partial,
    queries: _Queries,
    keys: tuple[Array, Array],
    places: _Places,
    attention: Any,
    width: int,
) -> Float[Array, "T B N H"]:
    return _forward(score, queries, keys, places, attention, width)[0]


def _forward(
    score: Partial,
    queries: _Queries,
    keys: tuple[Array, Array],
    places: _Places,
    attention: Any,
    width: int,
) -> tuple[Array, tuple[Any, ...]]:
    def few(these: tuple[_Queries, _Places]) -> Array:
        return attention(score, these[0], _windows(keys, these[1].window, width), these[1])

    found = lax.map(few, _in_parts((queries, places), keys[0], width))
    return _joined(found, queries), (score, queries, keys, places)


def _backward(attention: Any, width: int, kept: tuple[Any, ...], gradient: Array) -> tuple:
    """Scores are computed again. By hand, since the derivative of a gather is as large as the keys
    for each few queries, where adding to what the others gave is not."""
    score, queries, keys, places = kept

    def few(total: tuple[Any, Any], these: tuple[_Queries, _Places, Array]) -> Any:
        d_score, d_keys = total
        queries, places, gradient = these
        windows = _windows(keys, places.window, width)
        _, back = jax.vjp(lambda *x: attention(*x, places), score, queries, windows)
        more, d_queries, d_windows = back(gradient)
        d_score = jax.tree.map(jnp.add, d_score, more)
        d_keys = [_add_windows(*x, places.window) for x in zip(d_keys, d_windows, strict=True)]
        return (d_score, d_keys), d_queries

    none = jax.tree.map(jnp.zeros_like, score), [jnp.zeros(x.shape, jnp.float32) for x in keys]
    parts = _in_parts((queries, places, gradient), keys[0], width)
    (d_score, d_keys), d_queries = lax.scan(few, none, parts)
    d_keys = tuple(d.astype(x.dtype) for d, x in zip(d_keys, keys, strict=True))
    return d_score, _joined(d_queries, queries), d_keys, None


_in_windows.defvjp(_forward, _backward)


def _in_parts(arrays: Any, keys: Float[Array, "B N S H"], width: int) -> Any:
    """[T, ...] as [parts, few, ...], with zeros after the end."""
    batch, heads, _, size = keys.shape
    length = jax.tree.leaves(arrays)[0].shape[0]
    few = min(max(HELD // (batch * heads * width * size), 1), length)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, [(0, -length % few)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, few, *x.shape[1:])

    return jax.tree.map(cut, arrays)


def _joined(parts: Any, queries: _Queries) -> Any:
    """[parts, few, ...] as [T, ...] again."""
    length = queries.query.shape[0]
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:length], parts)


def _windows(arrays: tuple[Array, Array], begin: Array, width: int) -> tuple[Array, ...]:
    """Of each [B, N, S, H] the `width` keys from `begin` [T, B, N] on: [T, B, N, W, H]."""
    index = begin[..., None] + jnp.arange(width).reshape(1, 1, 1, -1)
    take = _of_each_head(lambda x, i: x[i], (0, 1), 1)
    return tuple(take(x, index) for x in arrays)


def _add_windows(total: Array, more: Array, begin: Array) -> Array:
    """`total` [B, N, S, H] with `more` [T, B, N, W, H] added where `_windows` took it from."""
    index = begin[..., None] + jnp.arange(more.shape[-2]).reshape(1, 1, 1, -1)
    add = _of_each_head(lambda x, i, d: x.at[i].add(d.astype(x.dtype)), (0, 1, 1), 0)
    return add(total, index, more)


def _of_each_head(function: Any, axes: tuple[int, ...], out: int) -> Any:
    """`function` for each row of the batch and each head, which stand at `axes`."""
    return jax.vmap(jax.vmap(function, axes, out), axes, out)
