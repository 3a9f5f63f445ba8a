"""Computes attention block by block, with memory linear in length and its own backward pass.

Uses an online softmax over blocks of keys (Milakov and Gimelshein 2018; Rabe and Staats 2021; Dao
et al. 2022, algorithms 1 and 4). Only the scores and the mask of one block of queries and one block
of keys are in memory at a time. Blocks that a causal mask or a window hides entirely are skipped.

Comments write the scores of a block as [c gq k]: c key heads, g query heads per key head, q queries
and k keys.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from transformer_jax.attention.functional import ContextAndWeights
from transformer_jax.attention.masks import Mask
from transformer_jax.types import Heads, KVHeads

HIDDEN_SCORE = -1e30
"""The score of a hidden key: finite, so that no difference of scores is NaN."""


class Blocks(NamedTuple):
    """Size of a block: key heads, queries of each query head, and keys."""

    heads: int
    queries: int
    keys: int


def blockwise(
    query: Heads,
    key: KVHeads,
    value: KVHeads,
    mask: Mask | None = None,
    *,
    blocks: Blocks | None = None,
) -> ContextAndWeights:
    """Returns softmax(Q Kᵀ / √H) V, computed block by block, and None for the weights.

    blocks: the block size; None: that of `choose_blocks`. Biases, dense masks and dropout are not
    supported, since each would need the memory that this kernel saves.
    """
    mask = Mask() if mask is None else mask
    plan = _plan(query, key, mask, blocks)
    mask = _per_head(plan, mask, key.shape[:2])
    grouped = query.reshape(*key.shape[:2], plan.group, *query.shape[2:])
    output: Array = _attend(grouped, key, value, mask, plan)
    return ContextAndWeights(output.reshape(query.shape), None)


def choose_blocks(heads: int, group: int, queries: int, keys: int, mask: Mask) -> Blocks:
    """Returns the block size for `heads` key heads, each of which serves `group` query heads.

    `heads` counts the heads of the whole batch. If a window hides most keys, blocks have the
    window's size. Otherwise, a single block is used as long as its scores fit in a CPU's last-level
    cache. For longer inputs, the scores of a block fit in the second-level cache, and a block has
    several heads, so that cores share large matmuls.
    """
    if mask.aligned and mask.window is not None:
        near = min(queries, MAX_BLOCK, max(MIN_WINDOW_BLOCK, mask.window // 2))
        span = _span(near, keys, mask.window, mask.causal)
        if 2 * span <= keys:
            return _fit_heads(heads, group, near, -(-span // -(-span // MAX_BLOCK)))
    if heads * group * queries * keys <= SINGLE_BLOCK_SCORES:
        return Blocks(heads, queries, keys)
    return _fit_heads(heads, group, min(queries, MAX_BLOCK), min(keys, MAX_BLOCK))


def _fit_heads(heads: int, group: int, queries: int, keys: int) -> Blocks:
    """Returns a block size with as many heads as `BLOCK_SCORES` allows."""
    return Blocks(min(heads, max(1, BLOCK_SCORES // (group * queries * keys))), queries, keys)


def _span(queries: int, keys: int, window: int, causal: bool) -> int:
    """Returns the maximum number of keys that a block of consecutive queries reaches."""
    return min(queries + window * (1 if causal else 2), keys)


# Measured with 8 heads of 64 on two cores of an AMD EPYC.
SINGLE_BLOCK_SCORES = 2**22
"""Maximum number of scores for which a single block is used."""
BLOCK_SCORES = 2**20
"""Maximum number of scores in a block if there are several."""
MAX_BLOCK = 512
"""Maximum number of queries, and of keys, in a block."""
MIN_WINDOW_BLOCK = 64
"""Minimum number of queries in a block with a window; with fewer, the loop costs more than it
saves."""


class _Plan(NamedTuple):
    """Sizes of a call, and the blocks of keys that each block of queries reaches."""

    group: int  # query heads per key head
    queries: int
    keys: int
    size: Blocks

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of query blocks and of key blocks."""
        return -(-self.queries // self.size.queries), -(-self.keys // self.size.keys)

    def reach(self, mask: Mask, block: Any) -> tuple[Any, Any]:
        """Returns the first key that a block of queries reaches, and the number of key blocks.

        With a window, this number is the same for every block of queries, so that the loop has a
        static length.
        """
        first, blocks = block * self.size.queries, self.counts[1]
        if mask.aligned and mask.window is not None:
            span = _span(self.size.queries, self.keys, mask.window, mask.causal)
            count = -(-span // self.size.keys)
            return jnp.clip(first - mask.window, 0, (blocks - count) * self.size.keys), count
        if mask.aligned and mask.causal:
            blocks = jnp.minimum((first + self.size.queries - 1) // self.size.keys + 1, blocks)
        return 0, blocks


def _plan(query: Array, key: Array, mask: Mask, blocks: Blocks | None) -> _Plan:
    batch, heads, queries, _ = query.shape
    _, kv_heads, keys, _ = key.shape
    size = blocks or choose_blocks(batch * kv_heads, heads // kv_heads, queries, keys, mask)
    size = Blocks(*map(min, size, (batch * kv_heads, queries, keys)))
    return _Plan(heads // kv_heads, queries, keys, size)


def _pad(x: Array, multiple: int, axis: int) -> Array:
    """Returns `x` with zeros appended along `axis`, up to a multiple of `multiple`."""
    missing = -x.shape[axis] % multiple
    widths = [(0, missing if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths) if missing else x


def _per_head(plan: _Plan, mask: Mask, heads: tuple[int, ...]) -> Mask:
    """Returns the mask with arrays per head, [B G T] and [B G S], padded to whole blocks."""

    def padded(multiple: int, array: Array) -> Array:
        return _pad(jnp.broadcast_to(array[:, None], (*heads, array.shape[1])), multiple, 2)

    queries, keys = mask.positions(plan.queries, plan.keys)
    mask = replace(mask, query_positions=queries, key_positions=keys)
    if mask.key_segments is None and plan.keys % plan.size.keys:  # hides the last block's padding
        mask = replace(mask, key_segments=jnp.ones((1, plan.keys), jnp.int32))
    return mask.mapped(partial(padded, plan.size.queries), partial(padded, plan.size.keys))


def _is_unmasked(mask: Mask) -> bool:
    return mask.key_segments is None and not mask.causal and mask.window is None


def _scores(plan: _Plan, mask: Mask, q_i: Array, k_j: Array, i: Any, start: Any) -> Array:
    """Returns the scores [c gq k] of block i of queries and the block of keys at `start`."""
    _, queries, keys = plan.size
    scores = _matmul("cqh,ckh->cqk", q_i, k_j)
    if _is_unmasked(mask):
        return scores
    mask = mask.mapped(
        lambda x: _block(x, i * queries, queries, 1), lambda x: _block(x, start, keys, 1)
    )
    hidden = jnp.where(mask.dense(queries, keys)[:, 0], 0, HIDDEN_SCORE)
    return scores + (jnp.tile(hidden, (1, plan.group, 1)) if hidden.shape[1] > 1 else hidden)


def _matmul(equation: str, a: Array, b: Array) -> Array:
    """Returns an einsum in float32, in which q stands for the queries of all heads of a group."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _block(x: Array, start: Any, size: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _block_of_queries(x: Array, i: Any, size: int) -> Array:
    """Returns block i of [c g q ...] as [c gq ...]: one matmul for all heads that share keys."""
    block = _block(x, i * size, size, 2)
    return block.reshape(block.shape[0], -1, *block.shape[3:])


def _over_heads(plan: _Plan, function: Callable[..., Any], *arrays: Any) -> Any:
    """Applies `function` to blocks of heads [c, ...] of the arrays [B, G, ...].

    If one block holds all heads, there is no loop.
    """
    batch, kv_heads = arrays[-1].shape[:2]
    count, size = batch * kv_heads, plan.size.heads

    def split(x: Array) -> Array:
        return _pad(x.reshape(count, *x.shape[2:]), size, 0).reshape(-1, size, *x.shape[2:])

    blocks = jax.tree.map(split, arrays)
    if count <= size:
        result = function(*jax.tree.map(lambda x: x[0], blocks))
    else:
        result = lax.map(lambda block: function(*block), blocks)
        result = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], result)
    return jax.tree.map(lambda x: x.reshape(batch, kv_heads, *x.shape[1:]), result)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(query: Array, key: Array, value: Array, mask: Mask, plan: _Plan) -> Array:
    return _forward(query, key, value, mask, plan)[0]


def _forward(
    query: Array, key: Array, value: Array, mask: Mask, plan: _Plan
) -> tuple[Array, tuple[Any, ...]]:
    """Returns the output [B G g T H] and the residuals of the backward pass.

    The residuals are the inputs, the output, and the largest score and the softmax's denominator of
    each query.
    """
    size = plan.size

    def heads(mask: Mask, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        def block_of_queries(i: Any) -> tuple[Array, Array, Array]:
            q_i = _block_of_queries(q, i, size.queries)
            first, count = plan.reach(mask, i)

            def block_of_keys(j: Any, maximum: Array | None = None) -> tuple[Array, Array, Array]:
                start = first + j * size.keys
                k_j, v_j = (_block(x, start, size.keys, 1) for x in (k, v))
                scores = _scores(plan, mask, q_i, k_j, i, start)
                highest = jnp.max(scores, axis=-1)
                maximum = highest if maximum is None else jnp.maximum(maximum, highest)
                weights = jnp.exp(scores - maximum[..., None])
                output = _matmul("cqk,ckh->cqh", weights.astype(v.dtype), v_j)
                return output, maximum, jnp.sum(weights, axis=-1)

            # The online softmax: when a block has a higher score, what was summed so far is
            # scaled down to the new maximum.
            def add(j: Any, carry: tuple) -> tuple:
                output, old_maximum, total = carry
                more, maximum, sums = block_of_keys(j, old_maximum)
                scale = jnp.exp(old_maximum - maximum)
                return output * scale[..., None] + more, maximum, total * scale + sums

            if isinstance(count, int) and count == 1:
                output, maximum, total = block_of_keys(0)
            else:
                zeros = jnp.zeros(q_i.shape[:-1])
                carry = jnp.zeros(q_i.shape), zeros + HIDDEN_SCORE, zeros
                output, maximum, total = lax.fori_loop(0, count, add, carry)
            if not _is_unmasked(mask):  # the output of a query without keys is 0
                total = jnp.where(maximum > HIDDEN_SCORE / 2, total, jnp.inf)
            return (output / total[..., None]).astype(q.dtype), maximum, total

        return _over_queries(plan, block_of_queries)

    scaled = _pad(query * query.shape[-1] ** -0.5, size.queries, 3)
    keys_values = [_pad(x, size.keys, 2) for x in (key, value)]
    result = _over_heads(plan, heads, mask, scaled, *keys_values)
    output, maximum, total = (x[:, :, :, : plan.queries] for x in result)
    return output, (query, key, value, mask, output, maximum, total)


def _over_queries(plan: _Plan, function: Callable[[Any], Any]) -> Any:
    """Applies `function` to the index of each block of queries and joins what it returns."""
    if plan.counts[0] == 1:
        blocks = jax.tree.map(lambda x: x[None], function(0))
    else:
        blocks = lax.map(function, jnp.arange(plan.counts[0]))
    return jax.tree.map(partial(_join_queries, plan), blocks)


def _join_queries(plan: _Plan, blocks: Array) -> Array:
    """Returns blocks [i c gq ...] of queries as [c g T ...]."""
    x = blocks.reshape(*blocks.shape[:2], plan.group, plan.size.queries, *blocks.shape[3:])
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _backward(plan: _Plan, residuals: tuple, gradient: Array) -> tuple[Any, ...]:
    """Returns the gradients of query, key and value (Dao et al. 2022, algorithm 4).

    Recomputes the scores S. With P = softmax(S) and the gradient dO of the output O = P V:
    dV = Pᵀ dO, dP = dO Vᵀ, dS = P ∘ (dP - rowsum(dO ∘ O)), dQ = dS K and dK = dSᵀ Q.
    """
    query, key, value, mask, output, maximum, total = residuals
    size, scale = plan.size, query.shape[-1] ** -0.5
    # P is exp(S - maximum) / total. With dO divided by the total here, once per query, the loops
    # need not divide each block of scores.
    gradient = (gradient / total[..., None]).astype(gradient.dtype)
    inner = jnp.sum(gradient.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)

    def heads(
        mask: Mask, q: Array, g: Array, m: Array, d: Array, k: Array, v: Array
    ) -> tuple[Array, Array, Array]:
        def block_of_queries(carry: tuple, i: Any) -> tuple[tuple, Array]:
            q_i, g_i, m_i, d_i = (_block_of_queries(x, i, size.queries) for x in (q, g, m, d))
            first, count = plan.reach(mask, i)

            # dQ of this block of queries is a sum over blocks of keys. dK and dV are sums over
            # blocks of queries: they are carried from one block of queries to the next.
            def add(j: Any, carry: tuple) -> tuple:
                d_q, d_k, d_v = carry
                start = first + j * size.keys
                k_j, v_j = (_block(x, start, size.keys, 1) for x in (k, v))
                weights = jnp.exp(_scores(plan, mask, q_i, k_j, i, start) - m_i[..., None])
                d_weights = _matmul("cqh,ckh->cqk", g_i, v_j)
                d_scores = (weights * (d_weights - d_i[..., None])).astype(q.dtype)
                d_k = _add(d_k, _matmul("cqk,cqh->ckh", d_scores, q_i), start)
                d_v = _add(d_v, _matmul("cqk,cqh->ckh", weights.astype(q.dtype), g_i), start)
                return d_q + _matmul("cqk,ckh->cqh", d_scores, k_j), d_k, d_v

            carry = jnp.zeros(q_i.shape, jnp.float32), *carry
            once = plan.counts == (1, 1)  # without the copies that a loop's carry would need
            d_q, d_k, d_v = add(0, carry) if once else lax.fori_loop(0, count, add, carry)
            return (d_k, d_v), d_q

        zeros = jnp.zeros(k.shape, jnp.float32)
        d_keys_values, d_q = lax.scan(block_of_queries, (zeros, zeros), jnp.arange(plan.counts[0]))
        return _join_queries(plan, d_q), *d_keys_values

    queries = [_pad(x, size.queries, 3) for x in (query * scale, gradient, maximum, inner)]
    keys_values = [_pad(x, size.keys, 2) for x in (key, value)]
    d_q, *d_keys_values = _over_heads(plan, heads, mask, *queries, *keys_values)
    d_q = (d_q[:, :, :, : plan.queries] * scale).astype(query.dtype)
    d_k, d_v = (x[:, :, : plan.keys] for x in d_keys_values)
    return d_q, d_k.astype(key.dtype), d_v.astype(value.dtype), None


def _add(total: Array, block: Array, start: Any) -> Array:
    """Returns `total` with `block` added to the keys from `start`."""
    block += _block(total, start, block.shape[1], 1)
    return lax.dynamic_update_slice_in_dim(total, block, start, 1)


_attend.defvjp(_forward, _backward)
