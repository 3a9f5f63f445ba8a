"""Operations are counted right, and those of a window do not grow with the length."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.tree_util import Partial

from transformer_jax.attention import Mask, attend, scores
from transformer_jax.attention.gathered import local_p_gathered
from transformer_jax.flops import count_flops, largest_matmul

A, B = jnp.ones((3, 4)), jnp.ones((4, 5))
MATMUL = 2 * 3 * 4 * 5
SQUARE = jnp.ones((3, 3))
STEP = 2 * 3 * 3 * 3


def repeated(x: Any) -> Any:
    return lax.fori_loop(0, 7, lambda _, y: y @ x, x)


COUNTED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "matmul": (jnp.dot, (A, B), MATMUL),
    "batch": (jnp.matmul, (jnp.ones((6, 3, 4)), jnp.ones((6, 4, 5))), 6 * MATMUL),
    "shapes": (jnp.dot, (jax.ShapeDtypeStruct(A.shape, A.dtype), B), MATMUL),
    "jit": (jax.jit(jnp.dot), (A, B), MATMUL),
    "gradients": (jax.grad(lambda a, b: jnp.sum(jnp.dot(a, b)), (0, 1)), (A, B), 3 * MATMUL),
    "loop": (repeated, (SQUARE,), 7 * STEP),
    "gradient of a loop": (jax.grad(lambda x: jnp.sum(repeated(x))), (SQUARE,), 3 * 7 * STEP),
    "loop of loops": (lambda x: lax.map(repeated, jnp.stack([x, x])), (SQUARE,), 14 * STEP),
    "remat": (jax.checkpoint(jnp.dot), (A, B), MATMUL),
    "most expensive branch": (
        lambda x: lax.cond(x[0, 0] > 0, lambda y: y @ y @ y, lambda y: y @ y, x),
        (SQUARE,),
        2 * STEP,
    ),
    "no matmuls in an endless loop": (
        lambda x: lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y + 1, x @ x),
        (SQUARE,),
        STEP,
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_matmuls_are_counted(name: str) -> None:
    function, args, wanted = COUNTED[name]
    assert count_flops(function, *args) == wanted


def test_a_loop_of_unknown_length_is_refused() -> None:
    def grows(x: Any) -> Any:
        return lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y @ y, x)

    said = r"while: how often a loop that carries float32\[3,3\] runs depends"
    with pytest.raises(ValueError, match=said):
        count_flops(grows, SQUARE)


def soft(x: jax.Array, window: int) -> jax.Array:
    return attend(x, x, x, kernel="blockwise")[0]


def local_m(x: jax.Array, window: int) -> jax.Array:
    return attend(x, x, x, Mask(window=window), kernel="blockwise")[0]


def local_p(x: jax.Array, window: int) -> jax.Array:
    length = jnp.full((1, x.shape[2]), x.shape[2])
    near = {"center": x[..., 0], "window": window, "score": Partial(scores.scaled_dot)}
    return local_p_gathered(x, x, x, 0 * length, length, **near)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("kind", [soft, local_m, local_p])
def test_a_windows_cost_does_not_grow(kind: Callable[..., jax.Array], gradient: bool) -> None:
    def flops(length: int, window: int) -> float:
        def run(x: jax.Array) -> Any:
            return jax.vjp(partial(kind, window=window), x)[1](x) if gradient else kind(x, window)

        shape = jax.ShapeDtypeStruct((1, 8, length, 64), jnp.float32)
        return count_flops(run, shape) / length

    growth = flops(4096, 16) / flops(1024, 16)
    assert growth == pytest.approx(4 if kind is soft else 1, rel=0.03)
    if kind is not soft:
        # Four times the window: nearly four times the cost, less what a block of queries adds.
        assert 2.5 < flops(4096, 256) / flops(4096, 64) < 4


@pytest.mark.parametrize(
    ("function", "args", "elements"),
    [
        (lambda a, b: jnp.sum((a @ b) @ b.T), (A, B), 3 * 5),
        (lambda x: lax.map(repeated, jnp.stack([x, x])), (SQUARE,), 3 * 3),
        (jax.jit(lambda a, b: (a @ b).astype(jnp.float32)), (A, B), 3 * 5),
        (jnp.sum, (A,), 0),
    ],
)
def test_largest_matmul(function: Callable[..., Any], args: tuple[Any, ...], elements: int) -> None:
    assert largest_matmul(function, *args) == 4 * elements
    half = [x.astype(jnp.bfloat16) for x in args]
    assert largest_matmul(function, *half) == 2 * elements
