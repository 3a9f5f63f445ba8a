"""What a function's matrix products cost: floating-point operations, loops and all, and memory.

XLA's own `cost_analysis` counts the body of a loop once, however often it runs; its
`memory_analysis` does not know what a library takes that computes several operations at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core


def count_flops(function: Callable[..., Any], *args: Any) -> int:
    """2 M N K for each product of [M, K] by [K, N] that `function(*args)` computes, all together.

    `args`: arrays, or `jax.ShapeDtypeStruct`s. A `scan` counts as often as it runs (a `fori_loop`
    between constants is one), and of the branches of a `cond` the dearest. ValueError: products in
    a `while` loop, which runs as often as its values say.
    """
    return _of_jaxpr(jax.make_jaxpr(function)(*args).jaxpr)


def largest_product(function: Callable[..., Any], *args: Any) -> int:
    """Bytes of the largest product that `function(*args)` computes; 0: it computes none.

    `args`: arrays, or `jax.ShapeDtypeStruct`s.
    """
    return _largest(jax.make_jaxpr(function)(*args).jaxpr)


def _largest(jaxpr: Any) -> int:
    products = [e.outvars[0].aval for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    inner = [_largest(inside) for e in jaxpr.eqns for inside in _inner(e.params)]
    return max([*inner, *(x.size * x.dtype.itemsize for x in products)], default=0)


def _of_jaxpr(jaxpr: Any) -> int:
    return sum(_of_equation(e.primitive.name, e) for e in jaxpr.eqns)


def _of_equation(name: str, equation: Any) -> int:
    inner = [_of_jaxpr(jaxpr) for jaxpr in _inner(equation.params)]
    if name == "dot_general":
        return _of_product(equation)
    if name == "scan":
        return equation.params["length"] * sum(inner)
    if name == "while" and any(inner):
        shapes = ", ".join(str(x.aval) for x in equation.outvars)
        raise ValueError(
            f"while: a loop that carries {shapes} runs as often as its values say, so that its "
            "products cannot be counted; give it a fixed length (lax.scan)"
        )
    return max(inner) if name == "cond" else sum(inner)


def _of_product(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs that an equation of these parameters runs."""
    for leaf in jax.tree.leaves(list(params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(leaf):
            yield getattr(leaf, "jaxpr", leaf)


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)
