"""The two matrix products of attention alone: the rate that no kernel of products exceeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.benchmark.cases import Case
from transformer_jax.benchmark.programs import one_device
from transformer_jax.parallel.compile import compile_step

SCORES_PER_STEP = 2**20
STEPS = 16
"""Steps in a call, so that the cost of the call itself is negligible."""


def products_call(case: Case) -> Callable[[], Any]:
    """Returns a call of both products without the softmax, at the case's length and width."""
    keys = jnp.ones((case.length, case.head_size), case.dtype)
    query = jnp.ones((queries_per_step(case), case.head_size), case.dtype)

    def products(
        query: Float[Array, "T H"], keys: Float[Array, "S H"], steps: Int[Array, " steps"]
    ) -> list[jax.Array]:
        def step(total: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
            shifted = query + index.astype(query.dtype)  # a new query, so that no step is reused
            return total + (shifted @ keys.T) @ keys, None

        return [jax.lax.scan(step, query, steps)[0]]

    inputs = [query, keys, jnp.arange(STEPS)]
    with jax.default_matmul_precision(case.precision):
        compiled = compile_step(products, one_device()).lower(*inputs).compile()
    return lambda: jax.block_until_ready(compiled(*inputs))


def queries_per_step(case: Case) -> int:
    """Returns the queries of a step, so that its scores have a fixed size."""
    return max(1, SCORES_PER_STEP // case.length)


def floor_seconds(case: Case, fastest: float) -> float:
    """Returns the seconds of the case's products at the rate of the fastest `products_call`.

    There are two products forward and four more backward. A causal mask needs half of each.
    """
    per_query = fastest / (STEPS * queries_per_step(case))
    pairs = 3 if case.direction == "both" else 1
    queries = case.length * case.batch * case.heads
    return pairs * per_query * queries * case.share_of_scores
