"""Counts the operations and the memory of a function's matmuls from its jaxpr.

XLA's own `cost_analysis` counts the body of a loop once, however often it runs. Its
`memory_analysis` leaves out the memory of libraries that compute several operations at once.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

from transformer_jax.errors import UserError
from transformer_jax.types import Size


def count_flops(function: Callable[..., Any], *args: Any) -> int:
    """Returns the operations of all matmuls that `function(*args)` computes.

    A matmul of [M, K] by [K, N] counts 2 M N K. `args` are arrays or `jax.ShapeDtypeStruct`s. A
    `scan` counts as often as it runs (a `fori_loop` with constant bounds is one), and a `cond` as
    its most expensive branch. UserError: a `while` loop contains matmuls, and how often it runs
    depends on values.
    """
    return count_matmuls(jax.make_jaxpr(function)(*args).jaxpr)


def largest_matmul(function: Callable[..., Any], *args: Any) -> int:
    """Returns the bytes of the largest matmul result that `function(*args)` computes, or 0 if none.

    `args` are arrays or `jax.ShapeDtypeStruct`s.
    """
    return _largest(jax.make_jaxpr(function)(*args).jaxpr)


def _largest(jaxpr: Any) -> int:
    results = [e.outvars[0].aval for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    inner = [_largest(sub) for e in jaxpr.eqns for sub in _subjaxprs(e.params)]
    return max([*inner, *(x.size * x.dtype.itemsize for x in results)], default=0)


def count_matmuls(jaxpr: Any) -> Size:
    """Returns the operations of all matmuls of a jaxpr, as `count_flops`.

    The number is symbolic if sizes are (`jax.export`).
    """
    return sum(_count_equation(e.primitive.name, e) for e in jaxpr.eqns)


def _count_equation(name: str, equation: Any) -> Size:
    inner = [count_matmuls(jaxpr) for jaxpr in _subjaxprs(equation.params)]
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        sizes = [equation.invars[0].aval.shape[i] for i in contracted]
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(sizes)
    if name == "scan":
        return equation.params["length"] * sum(inner)
    if name == "while" and any(inner):
        shapes = ", ".join(str(x.aval) for x in equation.outvars)
        raise UserError(
            f"while: how often a loop that carries {shapes} runs depends on values, so that its "
            "matmuls cannot be counted; use a fixed length (lax.scan)"
        )
    return max(inner) if name == "cond" else sum(inner)


def _subjaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """Yields the jaxprs that an equation with these parameters runs."""
    for leaf in jax.tree.leaves(list(params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(leaf):
            yield getattr(leaf, "jaxpr", leaf)


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)
