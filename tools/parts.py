"""Changes to parts of a training step that were tried: each beside what it changes, in turns."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tools.common import spread
from transformer_jax.attention import attend
from transformer_jax.attention.positions import rotate
from transformer_jax.benchmark.timing import time_in_turns, timer
from transformer_jax.dense import multiply
from transformer_jax.training.losses import token_loss
from transformer_jax.training.optimizer import MUON_ITERATIONS

ROWS, LENGTH, WIDTH, HIDDEN, HEADS, HEAD, IDS = 128, 32, 160, 480, 5, 32, 4000
"""Sizes of the recipe of Multi30k, and of a full batch."""
SAMPLES = 15


class Change(NamedTuple):
    """Two functions of the same inputs."""

    name: str
    kept: bool
    before: Callable[..., Any]
    after: Callable[..., Any]
    inputs: tuple[Array, ...]


def draw(*shape: int) -> Array:
    """Returns random numbers."""
    return jax.random.normal(jax.random.key(sum(shape)), shape)


def with_gradient(function: Callable[..., Array], *inputs: Array) -> Any:
    """Returns the result of a function, summed, and its gradients."""
    return jax.value_and_grad(lambda x: jnp.sum(jnp.square(function(*x))))(inputs)


def rotated(x: Array, positions: Array) -> Array:
    """Returns what `rotate` returns, with cosines that the program computes."""
    angle = positions[:, None, :, None] * 10000.0 ** -(jnp.arange(0, HEAD, 2) / HEAD)
    cos, sin = jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))
    even, odd = x[..., 0::2], x[..., 1::2]
    pairs = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return pairs.reshape(x.shape)


def changes() -> Iterator[Change]:
    """Yields what was tried."""
    x, tokens = draw(ROWS, LENGTH, WIDTH), ROWS * LENGTH
    for name, size in (("feed-forward", HIDDEN), ("logits", IDS)):
        einsum = partial(with_gradient, partial(jnp.einsum, "btd,df->btf"))
        matrices = partial(with_gradient, multiply)
        yield Change(f"matmuls of matrices: {name}", True, einsum, matrices, (x, draw(WIDTH, size)))

    heads, shared = draw(ROWS, HEADS, LENGTH, HEAD), draw(ROWS, 1, LENGTH, HEAD)

    def repeated(query: Array, key: Array, value: Array) -> Array:
        return attend(query, *(jnp.repeat(each, HEADS, axis=1) for each in (key, value)))[0]

    def grouped(query: Array, key: Array, value: Array) -> Array:
        return attend(query, key, value)[0]

    before, after = partial(with_gradient, repeated), partial(with_gradient, grouped)
    yield Change("a KV head is not repeated", True, before, after, (heads, shared, shared))

    positions = jnp.arange(LENGTH)[None]
    before = partial(with_gradient, partial(rotated, positions=positions))
    after = partial(with_gradient, partial(rotate, positions=positions, length=LENGTH))
    yield Change("rotary positions from tables", True, before, after, (heads,))

    def products(query: Array, keys: Array) -> Array:
        return jnp.einsum("bnth,bnsh->bnts", query, keys.swapaxes(2, 3))

    inputs = (draw(16, 1, 25, HEAD), draw(16, 1, HEAD, 10 * LENGTH))
    yield Change("decoding: scores are a matmul", True, products, jnp.matmul, inputs)

    kernels = [draw(WIDTH, size) for size in (WIDTH, HEAD, HEAD)]

    def apart(x: Array, *kernels: Array) -> Array:
        return jnp.concatenate([jnp.tanh(multiply(x, kernel)) for kernel in kernels], axis=-1)

    def joined(x: Array, *kernels: Array) -> Array:
        return jnp.tanh(multiply(x, jnp.concatenate(kernels, axis=1)))

    before, after = partial(with_gradient, apart), partial(with_gradient, joined)
    yield Change("query, key and value in one matmul", False, before, after, (x, *kernels))

    targets = jnp.ones((ROWS, LENGTH), jnp.int32)

    def whole(x: Array, embeddings: Array) -> Array:
        return token_loss(multiply(x, embeddings.T), targets, 0.1)[0]

    def in_chunks(x: Array, embeddings: Array) -> Array:
        @jax.checkpoint
        def of_chunk(chunk: tuple[Array, Array]) -> Array:
            return token_loss(multiply(chunk[0], embeddings.T), chunk[1], 0.1)[0]

        split = (x.reshape(8, -1, *x.shape[1:]), targets.reshape(8, -1, LENGTH))
        return jnp.sum(jax.lax.map(of_chunk, split))

    before, after = partial(with_gradient, whole), partial(with_gradient, in_chunks)
    embeddings = draw(IDS, WIDTH) / tokens
    yield Change("logits and loss in eight parts", False, before, after, (x, embeddings))

    def orthogonal(x: Array) -> Array:
        for a, b, c in MUON_ITERATIONS:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x

    def one_by_one(stack: Array) -> list[Array]:
        return [orthogonal(x) for x in stack]

    inputs = (draw(24, WIDTH, WIDTH) / 10 / WIDTH,)
    yield Change("Muon: equal matrices together", False, one_by_one, jax.vmap(orthogonal), inputs)


def parts() -> dict[str, Any]:
    """Compares changes to parts of a training step with what they change, on one batch."""
    rows = []
    for change in changes():
        calls = {}
        for name in ("before", "after"):
            program = jax.jit(getattr(change, name)).lower(*change.inputs).compile()
            calls[name] = timer(partial(wait_for, program, *change.inputs))
        times = time_in_turns(calls, SAMPLES)
        row: dict[str, Any] = {"change": change.name}
        row["kept"] = "kept" if change.kept else "left"
        row |= {f"{name}_ms": samples.median * 1e3 for name, samples in times.items()}
        rows.append(row | {"ratio": spread(times["before"].over(times["after"]))})
        print(rows[-1], flush=True)
    return {"samples": SAMPLES, "rows": rows}


def wait_for(program: Any, *arguments: Any) -> None:
    """Calls a program, and waits for its results."""
    jax.block_until_ready(program(*arguments))
