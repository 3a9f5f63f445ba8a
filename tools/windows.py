"""Measures whether the cost of local attention follows from the window and not from the length.

    python -m tools.windows

Counts the operations of soft, local-m and local-p self-attention and times them in turns, for
windows of D positions on each side and growing lengths. Writes results/windows.json.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from transformer_jax.allocator import restart_with_allocator
from transformer_jax.attention import Mask, attend, scores
from transformer_jax.attention.gathered import local_p_gathered
from transformer_jax.benchmark import results
from transformer_jax.benchmark.timing import time_in_turns, timer
from transformer_jax.flops import count_flops

WINDOWS = (16, 64, 256)
LENGTHS = (512, 1024, 2048, 4096)
HEADS, WIDTH = 8, 64
SAMPLES = 3

Arrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Query, keys, values [1, N, S, H], and each query's center [1, N, S] as a share of the length."""


def soft(arrays: Arrays, window: int) -> jax.Array:
    """Attends to all keys, by the kernel that computes in blocks. Does not use `window`."""
    return attend(*arrays[:3], kernel="blockwise")[0]


def local_m(arrays: Arrays, window: int) -> jax.Array:
    """Attends to a sliding window."""
    return attend(*arrays[:3], Mask(window=window), kernel="blockwise")[0]


def local_p(arrays: Arrays, window: int) -> jax.Array:
    """Attends to windows around the centers."""
    query, keys, values, share = arrays
    length = jnp.full((1, query.shape[2]), keys.shape[2])
    near = {"center": share * keys.shape[2], "window": window, "score": Partial(scores.scaled_dot)}
    return local_p_gathered(query, keys, values, 0 * length, length, **near)


def both(kind: Callable[..., Any], arrays: Arrays, window: int) -> Any:
    """Returns the context and the gradients of all arrays; the query serves as its gradient."""
    context, back = jax.vjp(partial(kind, window=window), arrays)
    return context, back(arrays[0])


KINDS = {"soft": soft, "local-m": local_m, "local-p": local_p}
MODES: dict[str, Callable[..., Any]] = {
    "forward": lambda kind, arrays, window: kind(arrays, window),
    "both": both,
}


def flops_per_query(kind: str, mode: str, length: int, window: int) -> float:
    """Returns the operations of matmuls for a query of one head."""
    shape = (1, HEADS, length, WIDTH)
    array = jax.ShapeDtypeStruct(shape, jnp.float32)
    share = jax.ShapeDtypeStruct(shape[:3], jnp.float32)
    run = partial(MODES[mode], KINDS[kind], window=window)
    return count_flops(run, (array, array, array, share)) / (HEADS * length)


def measure(length: int, window: int) -> list[dict[str, Any]]:
    """Returns operations and median microseconds for a query of one head by kind and mode."""
    key = jax.random.key(0)
    shape = (1, HEADS, length, WIDTH)
    arrays = tuple(jax.random.normal(jax.random.fold_in(key, i), shape) for i in range(3))
    arrays += (jax.random.uniform(key, shape[:3]),)
    runs = {
        (kind, mode): jax.jit(partial(MODES[mode], KINDS[kind], window=window))
        for kind in KINDS
        for mode in MODES
        if kind != "soft" or window == WINDOWS[0]  # soft has no window: measured once
    }

    def run(name: tuple[str, str]) -> None:
        jax.block_until_ready(runs[name](arrays))

    times = time_in_turns({name: timer(partial(run, name)) for name in runs}, SAMPLES)
    return [
        {
            "kind": kind,
            "mode": mode,
            "length": length,
            "window": None if kind == "soft" else window,
            "flops_per_query": flops_per_query(kind, mode, length, window),
            "us_per_query": samples.median / (HEADS * length) * 1e6,
        }
        for (kind, mode), samples in times.items()
    ]


def main() -> None:
    """Measures every length and window and writes the result file."""
    restart_with_allocator()
    found = [row for length in LENGTHS for window in WINDOWS for row in measure(length, window)]
    about = {"heads": HEADS, "head_size": WIDTH, "batch": 1, "samples": SAMPLES}
    print(results.write("windows", "make windows", about | {"rows": found}))


if __name__ == "__main__":
    main()
