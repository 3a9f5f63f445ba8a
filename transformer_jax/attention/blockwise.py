"""Attention by blocks: memory linear in length, masks made inside, its own backward pass.

An online softmax over blocks of keys (Milakov and Gimelshein 2018; Rabe and Staats 2021; Dao et
al. 2022, algorithms 1 and 4): no more is held than the scores of one block of queries and one of
keys. Blocks that a causal mask or a window hides whole are not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from transformer_jax.attention.masks import Mask

NOTHING = -1e30
"""The score of a key that is not seen: finite, so that no difference of scores is NaN."""


class Blocks(NamedTuple):
    """How many queries and keys are in a block."""

    queries: int = 512
    keys: int = 512


BLOCKS = Blocks()

_LEAST = 64
"""Queries in a block of a small window: below, the steps of the loop cost more than they save."""


def blockwise(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B G S H"],
    value: Float[Array, "B G S H"],
    mask: Any = None,
    *,
    bias: Any = None,
    dropout: Any = None,
    blocks: Blocks = BLOCKS,
) -> tuple[Float[Array, "B N T H"], None]:
    """softmax(Q Kᵀ / √H) V without ever holding all scores. `mask`: a `Mask` or None.

    ValueError: a bias, dropout or a dense mask, which would take the memory that this saves.
    """
    for name, given in (("bias", bias), ("dropout", dropout)):
        if given is not None:
            raise ValueError(f"kernel blockwise: has no {name}; use kernel reference")
    mask = Mask() if mask is None else mask
    if not isinstance(mask, Mask):
        raise ValueError(
            "kernel blockwise: has no dense masks; give a Mask or use kernel reference"
        )
    plan = _plan(query, key, mask, blocks)
    return _attend(query, key, value, _rows(plan, mask, query.shape[0]), plan), None


class _Plan(NamedTuple):
    """The sizes of a call, and which blocks of keys a block of queries can see."""

    heads: int
    group: int  # query heads for each head of keys
    queries: int
    keys: int
    size: Blocks
    causal: bool
    window: int | None
    aligned: bool

    @property
    def counts(self) -> tuple[int, int]:
        """Blocks of queries and of keys."""
        return -(-self.queries // self.size.queries), -(-self.keys // self.size.keys)

    def reach(self, block: Any) -> tuple[Any, Any]:
        """The first key that some query of `block` sees, and how many blocks of keys from there on.

        In a window every block of queries has as many, so that the loop's length is known.
        """
        first, blocks = block * self.size.queries, self.counts[1]
        if self.aligned and self.window is not None:
            span = _span(self.size.queries, self.keys, self.window, self.causal)
            count = -(-span // self.size.keys)
            return jnp.clip(first - self.window, 0, (blocks - count) * self.size.keys), count
        if self.aligned and self.causal:
            blocks = jnp.minimum((first + self.size.queries - 1) // self.size.keys + 1, blocks)
        return 0, blocks


class _Row(NamedTuple):
    """What a row's mask follows from; as long as whole blocks of queries and keys."""

    query_segments: Array | None
    query_positions: Array
    key_segments: Array | None
    key_positions: Array


def _plan(query: Array, key: Array, mask: Mask, blocks: Blocks) -> _Plan:
    _, heads, queries, _ = query.shape
    _, shared, keys, _ = key.shape
    size = Blocks(min(blocks.queries, queries), min(blocks.keys, keys))
    if mask.aligned and mask.window is not None:
        size = _size_in_window(size, keys, mask.window, mask.causal)
    rule = (mask.causal, mask.window, mask.aligned)
    return _Plan(heads, heads // shared, queries, keys, size, *rule)


def _size_in_window(most: Blocks, keys: int, window: int, causal: bool) -> Blocks:
    """Blocks of a window's size: the keys that a block of queries sees, in as few as may be."""
    queries = min(most.queries, max(_LEAST, window // 2))
    span = _span(queries, keys, window, causal)
    return Blocks(queries, -(-span // -(-span // most.keys)))


def _span(queries: int, keys: int, window: int, causal: bool) -> int:
    """How many keys so many queries in a row see in a window, at most."""
    return min(queries + window * (1 if causal else 2), keys)


def _filled(x: Array, size: int, axis: int) -> Array:
    """`x` with zeros after its end along `axis`, to a multiple of `size`."""
    short = -x.shape[axis] % size
    return jnp.pad(x, [(0, short if a == axis else 0) for a in range(x.ndim)]) if short else x


def _rows(plan: _Plan, mask: Mask, batch: int) -> _Row:
    """The mask's arrays for each row of the batch."""

    def filled(array: Array, size: int) -> Array:
        return _filled(jnp.broadcast_to(array, (batch, array.shape[1])), size, 1)

    own, columns = mask.positions(plan.queries, plan.keys)
    queries, keys = mask.query_segments, mask.key_segments
    if keys is None and plan.keys % plan.size.keys:  # what fills up the last block is hidden
        keys = jnp.ones((1, plan.keys), jnp.int32)
    return _Row(
        None if queries is None else filled(queries, plan.size.queries),
        filled(own, plan.size.queries),
        None if keys is None else filled(keys, plan.size.keys),
        filled(columns, plan.size.keys),
    )


def _seen(plan: _Plan, row: _Row, i: Any, start: Any) -> Array | None:
    """Whether the queries of block i see the block of keys from `start` on; None: they do."""
    if row.key_segments is None and not plan.causal and plan.window is None:
        return None

    def cut(array: Array | None, start: Any, size: int) -> Any:
        return None if array is None else _block(array, start, size)[None]

    queries, keys = plan.size
    rule = Mask(
        cut(row.query_segments, i * queries, queries),
        cut(row.query_positions, i * queries, queries),
        cut(row.key_segments, start, keys),
        cut(row.key_positions, start, keys),
        causal=plan.causal,
        window=plan.window,
    )
    return rule.dense(queries, keys)[0, 0]


def _product(a: Array, b: Array, axis_a: int, axis_b: int) -> Array:
    """The matrix product over one axis of each, summed in float32."""
    dimensions = (((axis_a,), (axis_b,)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _block(x: Array, start: Any, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, start, size)


def _over_heads(
    plan: _Plan, run: Callable[..., Any], rows: _Row, by_head: list[Array], shared: list[Array]
) -> Any:
    """`run(row, arrays of the head, keys and values of its group)` for each head of each row."""
    batch = by_head[0].shape[0]
    by_head = [x.reshape(-1, *x.shape[2:]) for x in by_head]
    shared = [x.reshape(-1, *x.shape[2:]) for x in shared]

    def one(head: Array) -> Any:
        row = jax.tree.map(lambda x: x[head // plan.heads], rows)
        return run(row, *(x[head] for x in by_head), *(x[head // plan.group] for x in shared))

    found = lax.map(one, jnp.arange(batch * plan.heads))
    return jax.tree.map(lambda x: x.reshape(batch, plan.heads, *x.shape[1:]), found)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(query: Array, key: Array, value: Array, rows: _Row, plan: _Plan) -> Array:
    return _forward(query, key, value, rows, plan)[0]


def _forward(
    query: Array, key: Array, value: Array, rows: _Row, plan: _Plan
) -> tuple[Array, tuple[Any, ...]]:
    """The output, and what the backward pass needs: with the inputs, it and the log of the sums."""
    width = query.shape[-1]

    def head(row: _Row, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        def block_of_queries(i: Array) -> tuple[Array, Array]:
            q_i = _block(q, i * plan.size.queries, plan.size.queries)
            first, count = plan.reach(i)

            def block_of_keys(j: Any, carry: tuple) -> tuple:
                output, most, total = carry
                start = first + j * plan.size.keys
                scores = _product(q_i, _block(k, start, plan.size.keys), 1, 1)
                seen = _seen(plan, row, i, start)
                scores = scores if seen is None else jnp.where(seen, scores, NOTHING)
                new = jnp.maximum(most, jnp.max(scores, axis=1))
                weights = jnp.exp(scores - new[:, None])
                shrink = jnp.exp(most - new)
                more = _product(weights.astype(v.dtype), _block(v, start, plan.size.keys), 1, 0)
                total = total * shrink + jnp.sum(weights, axis=1)
                return output * shrink[:, None] + more, new, total

            size = plan.size.queries
            carry = jnp.zeros((size, width)), jnp.full((size,), NOTHING), jnp.zeros((size,))
            output, most, total = _loop(count, block_of_keys, carry)
            some = most > NOTHING / 2
            output = jnp.where(some[:, None], output / jnp.where(some, total, 1)[:, None], 0)
            return output.astype(q.dtype), jnp.where(some, most + jnp.log(total), -NOTHING)

        output, log_total = lax.map(block_of_queries, jnp.arange(plan.counts[0]))
        return output.reshape(-1, width), log_total.reshape(-1)

    scaled = query * query.shape[-1] ** -0.5
    of_queries = [_filled(scaled, plan.size.queries, 2)]
    of_keys = [_filled(x, plan.size.keys, 2) for x in (key, value)]
    output, log_total = _over_heads(plan, head, rows, of_queries, of_keys)
    output = output[:, :, : plan.queries]
    return output, (query, key, value, rows, output, log_total)


def _loop(count: Any, step: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`lax.fori_loop` from 0, without a loop where there is one step."""
    if isinstance(count, int) and count == 1:
        return step(0, carry)
    return lax.fori_loop(0, count, step, carry)


def _backward(plan: _Plan, kept: tuple, gradient: Array) -> tuple[Any, ...]:
    """Gradients of query, key and value (Dao et al. 2022, algorithm 4), scores computed again."""
    query, key, value, rows, output, log_total = kept
    size, scale = plan.size, query.shape[-1] ** -0.5
    inner = jnp.sum(gradient.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)

    def head(
        row: _Row, q: Array, g: Array, log_sum: Array, d: Array, k: Array, v: Array
    ) -> tuple[Array, Array, Array]:
        def block_of_queries(carry: tuple, i: Array) -> tuple[tuple, Array]:
            of_queries = (q, g, log_sum, d)
            q_i, g_i, log_i, d_i = (_block(x, i * size.queries, size.queries) for x in of_queries)
            first, count = plan.reach(i)

            def block_of_keys(j: Any, carry: tuple) -> tuple:
                d_q, d_k, d_v = carry
                start = first + j * size.keys
                k_j, v_j = _block(k, start, size.keys), _block(v, start, size.keys)
                scores = _product(q_i, k_j, 1, 1)
                seen = _seen(plan, row, i, start)
                scores = scores if seen is None else jnp.where(seen, scores, NOTHING)
                weights = jnp.exp(scores - log_i[:, None])
                d_scores = weights * (_product(g_i, v_j, 1, 1) - d_i[:, None])
                d_scores = d_scores.astype(q.dtype)
                d_k = _add_block(d_k, _product(d_scores, q_i, 0, 0), start)
                d_v = _add_block(d_v, _product(weights.astype(q.dtype), g_i, 0, 0), start)
                return d_q + _product(d_scores, k_j, 1, 0), d_k, d_v

            zeros = jnp.zeros(q_i.shape, jnp.float32)
            d_q, d_k, d_v = _loop(count, block_of_keys, (zeros, *carry))
            return (d_k, d_v), d_q

        zeros = jnp.zeros(k.shape, jnp.float32)
        (d_k, d_v), d_q = lax.scan(block_of_queries, (zeros, zeros), jnp.arange(plan.counts[0]))
        return d_q.reshape(-1, d_q.shape[-1]), d_k, d_v

    by_head = [_filled(x, size.queries, 2) for x in (query * scale, gradient, log_total, inner)]
    shared = [_filled(x, size.keys, 2) for x in (key, value)]
    d_q, d_k, d_v = _over_heads(plan, head, rows, by_head, shared)

    def of_group(x: Array) -> Array:
        grouped = x.reshape(x.shape[0], -1, plan.group, *x.shape[2:])
        return jnp.sum(grouped, axis=2)[:, :, : plan.keys].astype(key.dtype)

    d_q = (d_q[:, :, : plan.queries] * scale).astype(query.dtype)
    return d_q, of_group(d_k), of_group(d_v), None


def _add_block(total: Array, more: Array, start: Any) -> Array:
    sum_ = _block(total, start, more.shape[0]) + more
    return lax.dynamic_update_slice_in_dim(total, sum_, start, 0)


_attend.defvjp(_forward, _backward)
