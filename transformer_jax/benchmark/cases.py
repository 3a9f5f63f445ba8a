"""The cases of the benchmark of attention: their inputs, the function to time and its operations.

Arrays are [B, N, T, H], as `attend` receives them in the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_jax.attention import Mask, attend
from transformer_jax.benchmark.settings import AttentionBenchmark

Heads = Float[Array, "B N T H"]
KVHeads = Float[Array, "B G T H"]


class Case(NamedTuple):
    """One combination of sizes, mask and type, in which all kernels are compared."""

    dtype: str
    batch: int
    mask: str
    length: int
    direction: str
    """forward, or both: forward and backward."""
    heads: int
    kv_heads: int
    head_size: int

    def labels(self) -> dict[str, Any]:
        """Returns what tells the cases of one benchmark apart, as its records name it."""
        names = ("dtype", "batch", "mask", "length", "direction")
        return {name: getattr(self, name) for name in names}

    @property
    def attention_mask(self) -> Mask | None:
        """Returns the mask as `attend` takes it."""
        return Mask(causal=True) if self.mask == "causal" else None

    @property
    def precision(self) -> str | None:
        """Returns JAX's matmul precision: without one, GPUs and TPUs round float32 products."""
        return "float32" if self.dtype == "float32" else None

    @property
    def input_shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of query, key, value and the output's gradient."""
        query = (self.batch, self.heads, self.length, self.head_size)
        key = (self.batch, self.kv_heads, self.length, self.head_size)
        return [query, key, key, query]

    @property
    def input_bytes(self) -> int:
        """Returns the size of query, key, value and the output's gradient."""
        return sum(x.size * x.dtype.itemsize for x in abstract_inputs(self))

    @property
    def share_of_scores(self) -> float:
        """Returns the share of the scores [T, T] that the mask leaves."""
        return (self.length + 1) / (2 * self.length) if self.mask == "causal" else 1.0

    @property
    def flops(self) -> float:
        """Returns the operations of all products: 2 forward and 4 backward, 2 T T H a head."""
        products = 6 if self.direction == "both" else 2
        each = 2 * self.length**2 * self.head_size * self.batch * self.heads
        return products * each * self.share_of_scores


def cases(settings: AttentionBenchmark) -> Iterator[Case]:
    """Yields every case, in the order of its labels, short lengths before long ones as listed."""
    kv_heads = settings.kv_heads or settings.heads
    for labels in itertools.product(
        settings.dtypes,
        settings.batches,
        settings.masks,
        settings.lengths,
        ("forward", "both"),
    ):
        yield Case(*labels, settings.heads, kv_heads, settings.head_size)


def abstract_inputs(case: Case) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and types of query, key, value and the output's gradient."""
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype)) for shape in case.input_shapes]


def draw_inputs(case: Case) -> list[jax.Array]:
    """Returns query, key, value and the output's gradient, normally distributed."""
    keys = jax.random.split(jax.random.key(0), len(case.input_shapes))
    inputs = zip(keys, case.input_shapes, strict=True)
    return [jax.random.normal(key, shape, case.dtype) for key, shape in inputs]


def attention_function(case: Case, kernel: str) -> Callable[..., list[jax.Array]]:
    """Returns the function to time: attention by a kernel, of query, key, value and gradient.

    It returns the output and, in the direction "both", the gradients of query, key and value.
    """
    run = partial(attend, mask=case.attention_mask, kernel=kernel)

    def forward(query: Heads, key: KVHeads, value: KVHeads, gradient: Heads) -> list[jax.Array]:
        return [run(query, key, value)[0]]

    def both(query: Heads, key: KVHeads, value: KVHeads, gradient: Heads) -> list[jax.Array]:
        output, backward = jax.vjp(lambda *inputs: run(*inputs)[0], query, key, value)
        return [output, *backward(gradient)]

    return both if case.direction == "both" else forward
