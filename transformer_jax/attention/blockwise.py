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
    """How many heads of keys, queries of each of their heads, and keys are in a block."""

    heads: int
    queries: int
    keys: int


def blockwise(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B G S H"],
    value: Float[Array, "B G S H"],
    mask: Any = None,
    *,
    bias: Any = None,
    dropout: Any = None,
    blocks: Blocks | None = None,
) -> tuple[Float[Array, "B N T H"], None]:
    """softmax(Q Kᵀ / √H) V, holding the scores of one block at a time. `mask`: a `Mask` or None.

    `blocks` None: those measured to be fast (`choose_blocks`). ValueError: a bias, dropout or a
    dense mask, which would take the memory that this saves.
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
    rows = _rows(plan, mask, key.shape[:2])
    grouped = query.reshape(*key.shape[:2], plan.group, *query.shape[2:])
    output: Array = _attend(grouped, key, value, rows, plan)
    return output.reshape(query.shape), None


def choose_blocks(heads: int, group: int, queries: int, keys: int, mask: Mask) -> Blocks:
    """Blocks for so many heads of keys in the batch, each with a `group` of heads of queries.

    In a window that hides most keys, blocks of its size. Otherwise all at once while the scores fit
    a CPU's last cache; beyond that, blocks whose scores fit the second one, of more than one head
    so that cores share a product without cutting it small.
    """
    if mask.aligned and mask.window is not None:
        near = min(queries, MOST, max(LEAST, mask.window // 2))
        span = _span(near, keys, mask.window, mask.causal)
        if 2 * span <= keys:
            return _of_heads(heads, group, near, -(-span // -(-span // MOST)))
    if heads * group * queries * keys <= ALL_AT_ONCE:
        return Blocks(heads, queries, keys)
    return _of_heads(heads, group, min(queries, MOST), min(keys, MOST))


def _of_heads(heads: int, group: int, queries: int, keys: int) -> Blocks:
    return Blocks(min(heads, max(1, A_BLOCK // (group * queries * keys))), queries, keys)


def _span(queries: int, keys: int, window: int, causal: bool) -> int:
    """How many keys so many queries in a row see in a window, at most."""
    return min(queries + window * (1 if causal else 2), keys)


# Measured with 8 heads of 64 on two cores of an AMD EPYC.
ALL_AT_ONCE = 2**22
"""Scores up to which one block is all there is."""
A_BLOCK = 2**20
"""Scores in a block beyond that."""
MOST = 512
"""Queries in a block, and keys."""
LEAST = 64
"""Queries in a small window: below, the steps of the loop cost more than they save."""


class _Plan(NamedTuple):
    """The sizes of a call, and which blocks of keys a block of queries can see."""

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
    """What the mask of a head follows from, [B G T] and [B G S] in whole blocks."""

    query_segments: Array | None
    query_positions: Array
    key_segments: Array | None
    key_positions: Array


def _plan(query: Array, key: Array, mask: Mask, blocks: Blocks | None) -> _Plan:
    batch, heads, queries, _ = query.shape
    _, shared, keys, _ = key.shape
    size = blocks or choose_blocks(batch * shared, heads // shared, queries, keys, mask)
    least = map(min, size, (batch * shared, queries, keys))
    rule = (mask.causal, mask.window, mask.aligned)
    return _Plan(heads // shared, queries, keys, Blocks(*least), *rule)


def _filled(x: Array, size: int, axis: int) -> Array:
    """`x` with zeros after its end along `axis`, to a multiple of `size`."""
    short = -x.shape[axis] % size
    return jnp.pad(x, [(0, short if a == axis else 0) for a in range(x.ndim)]) if short else x


def _rows(plan: _Plan, mask: Mask, heads: tuple[int, ...]) -> _Row:
    """The mask's arrays for each head of each row of the batch."""

    def filled(array: Array, size: int) -> Array:
        return _filled(jnp.broadcast_to(array[:, None], (*heads, array.shape[1])), size, 2)

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


def _sees_all(plan: _Plan, row: _Row) -> bool:
    return row.key_segments is None and not plan.causal and plan.window is None


def _scores(plan: _Plan, row: _Row, q_i: Array, k_j: Array, i: Any, start: Any) -> Array:
    """Scores [c gq k] of the queries of block i and the keys from `start`, `NOTHING` if hidden."""

    def cut(array: Array | None, start: Any, size: int) -> Any:
        return None if array is None else _block(array, start, size, 1)

    _, queries, keys = plan.size
    scores = _product("cqh,ckh->cqk", q_i, k_j)
    if _sees_all(plan, row):
        return scores
    rule = Mask(
        cut(row.query_segments, i * queries, queries),
        cut(row.query_positions, i * queries, queries),
        cut(row.key_segments, start, keys),
        cut(row.key_positions, start, keys),
        causal=plan.causal,
        window=plan.window,
    )
    hidden = jnp.where(rule.dense(queries, keys)[:, 0], 0, NOTHING)
    return scores + (jnp.tile(hidden, (1, plan.group, 1)) if hidden.shape[1] > 1 else hidden)


def _product(equation: str, a: Array, b: Array) -> Array:
    """c: heads of keys; q: queries of a block, of each head of the group; k: keys. In float32."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _block(x: Array, start: Any, size: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _queries(x: Array, i: Any, size: int) -> Array:
    """Block i of queries [c g q ...] as [c gq ...]: one product for all heads that share keys."""
    cut = _block(x, i * size, size, 2)
    return cut.reshape(cut.shape[0], -1, *cut.shape[3:])


def _over_heads(plan: _Plan, run: Callable[..., Any], *arrays: Any) -> Any:
    """`run` on so many heads [c, ...] of each array [B, G, ...] as a block has, together or one
    block after the other."""
    batch, shared = arrays[-1].shape[:2]
    count, size = batch * shared, plan.size.heads

    def cut(x: Array) -> Array:
        return _filled(x.reshape(count, *x.shape[2:]), size, 0).reshape(-1, size, *x.shape[2:])

    blocks = jax.tree.map(cut, arrays)
    if count <= size:
        found = run(*jax.tree.map(lambda x: x[0], blocks))
    else:
        found = lax.map(lambda block: run(*block), blocks)
        found = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], found)
    return jax.tree.map(lambda x: x.reshape(batch, shared, *x.shape[1:]), found)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(query: Array, key: Array, value: Array, rows: _Row, plan: _Plan) -> Array:
    return _forward(query, key, value, rows, plan)[0]


def _forward(
    query: Array, key: Array, value: Array, rows: _Row, plan: _Plan
) -> tuple[Array, tuple[Any, ...]]:
    """The output [B G g T H], and what the backward pass needs: the inputs, it, and of each query
    the largest score and the sum."""
    size = plan.size

    def heads(row: _Row, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        def block_of_queries(i: Any) -> tuple[Array, Array, Array]:
            q_i = _queries(q, i, size.queries)
            first, count = plan.reach(i)

            def block_of_keys(j: Any, most: Array | None = None) -> tuple[Array, Array, Array]:
                start = first + j * size.keys
                k_j, v_j = (_block(x, start, size.keys, 1) for x in (k, v))
                scores = _scores(plan, row, q_i, k_j, i, start)
                highest = jnp.max(scores, axis=-1)
                most = highest if most is None else jnp.maximum(most, highest)
                weights = jnp.exp(scores - most[..., None])
                output = _product("cqk,ckh->cqh", weights.astype(v.dtype), v_j)
                return output, most, jnp.sum(weights, axis=-1)

            def add(j: Any, carry: tuple) -> tuple:
                output, most, total = carry
                more, new, sums = block_of_keys(j, most)
                shrink = jnp.exp(most - new)
                return output * shrink[..., None] + more, new, total * shrink + sums

            if isinstance(count, int) and count == 1:
                output, most, total = block_of_keys(0)
            else:
                zeros = jnp.zeros(q_i.shape[:-1])
                carry = jnp.zeros(q_i.shape), zeros + NOTHING, zeros
                output, most, total = lax.fori_loop(0, count, add, carry)
            if not _sees_all(plan, row):  # a query that sees no key gets 0
                total = jnp.where(most > NOTHING / 2, total, jnp.inf)
            return (output / total[..., None]).astype(q.dtype), most, total

        return _over_queries(plan, block_of_queries)

    scaled = _filled(query * query.shape[-1] ** -0.5, size.queries, 3)
    of_keys = [_filled(x, size.keys, 2) for x in (key, value)]
    found = _over_heads(plan, heads, rows, scaled, *of_keys)
    output, most, total = (x[:, :, :, : plan.queries] for x in found)
    return output, (query, key, value, rows, output, most, total)


def _over_queries(plan: _Plan, run: Callable[[Any], Any]) -> Any:
    """What `run` gives for each block of queries, [c g q ...], joined."""
    if plan.counts[0] == 1:
        found = jax.tree.map(lambda x: x[None], run(0))
    else:
        found = lax.map(run, jnp.arange(plan.counts[0]))
    return jax.tree.map(partial(_joined, plan), found)


def _joined(plan: _Plan, blocks: Array) -> Array:
    """Blocks [i c gq ...] of queries as [c g T ...]."""
    x = blocks.reshape(*blocks.shape[:2], plan.group, plan.size.queries, *blocks.shape[3:])
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _backward(plan: _Plan, kept: tuple, gradient: Array) -> tuple[Any, ...]:
    """Gradients of query, key and value (Dao et al. 2022, algorithm 4), scores computed again."""
    query, key, value, rows, output, most, total = kept
    size, scale = plan.size, query.shape[-1] ** -0.5
    # Divided by the sum here, the weights need not be: exp(score - most) is the forward pass's.
    gradient = (gradient / total[..., None]).astype(gradient.dtype)
    inner = jnp.sum(gradient.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)

    def heads(
        row: _Row, q: Array, g: Array, m: Array, d: Array, k: Array, v: Array
    ) -> tuple[Array, Array, Array]:
        def block_of_queries(carry: tuple, i: Any) -> tuple[tuple, Array]:
            q_i, g_i, m_i, d_i = (_queries(x, i, size.queries) for x in (q, g, m, d))
            first, count = plan.reach(i)

            def add(j: Any, carry: tuple) -> tuple:
                start = first + j * size.keys
                d_q, d_k, d_v = block_of_keys(start)
                return carry[0] + d_q, _add(carry[1], d_k, start), _add(carry[2], d_v, start)

            def block_of_keys(start: Any) -> tuple[Array, Array, Array]:
                k_j, v_j = (_block(x, start, size.keys, 1) for x in (k, v))
                weights = jnp.exp(_scores(plan, row, q_i, k_j, i, start) - m_i[..., None])
                d_weights = _product("cqh,ckh->cqk", g_i, v_j)
                d_scores = (weights * (d_weights - d_i[..., None])).astype(q.dtype)
                d_k = _product("cqk,cqh->ckh", d_scores, q_i)
                d_v = _product("cqk,cqh->ckh", weights.astype(q.dtype), g_i)
                return _product("cqk,ckh->cqh", d_scores, k_j), d_k, d_v

            if plan.counts == (1, 1):
                d_q, *of_keys = block_of_keys(0)
                return tuple(of_keys), d_q
            zeros = jnp.zeros(q_i.shape, jnp.float32)
            d_q, d_k, d_v = lax.fori_loop(0, count, add, (zeros, *carry))
            return (d_k, d_v), d_q

        zeros = jnp.zeros(k.shape, jnp.float32)
        if plan.counts == (1, 1):
            of_keys, d_q = block_of_queries((), 0)
            return _joined(plan, d_q[None]), *of_keys
        of_keys, d_q = lax.scan(block_of_queries, (zeros, zeros), jnp.arange(plan.counts[0]))
        return _joined(plan, d_q), *of_keys

    of_queries = [_filled(x, size.queries, 3) for x in (query * scale, gradient, most, inner)]
    of_keys = [_filled(x, size.keys, 2) for x in (key, value)]
    d_q, *found = _over_heads(plan, heads, rows, *of_queries, *of_keys)
    d_q = (d_q[:, :, :, : plan.queries] * scale).astype(query.dtype)
    d_k, d_v = (x[:, :, : plan.keys] for x in found)
    return d_q, d_k.astype(key.dtype), d_v.astype(value.dtype), None


def _add(total: Array, more: Array, start: Any) -> Array:
    more += _block(total, start, more.shape[1], 1)
    return lax.dynamic_update_slice_in_dim(total, more, start, 1)


_attend.defvjp(_forward, _backward)
