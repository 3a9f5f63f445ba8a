"""The one door to attention, `attend`, and the choice of the kernel behind it.

Heads stand before length, [B, N, T, H]: on a CPU the products then run on contiguous matrices and
are up to four times faster than with length before heads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from transformer_jax.attention import vendor
from transformer_jax.attention.blockwise import blockwise
from transformer_jax.attention.kinds import masked_softmax, weighted_sum
from transformer_jax.attention.masks import Mask, dense_mask
from transformer_jax.attention.scores import scaled_dot
from transformer_jax.config import did_you_mean
from transformer_jax.types import Size

Dropout = Callable[[Array], Array]
"""Applied to the attention weights [B, N, T, S] in training."""

AnyMask = Mask | Bool[Array, "#B #N #T S"] | None

Kernel = Callable[..., tuple[Array, Array | None]]
"""(query, key, value, mask, *, bias, dropout) -> (output, weights or None where it has none)."""


def reference(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B G S H"],
    value: Float[Array, "B G S H"],
    mask: AnyMask = None,
    *,
    bias: Float[Array, "#B #N #T S"] | None = None,
    dropout: Dropout | None = None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T S"]]:
    """softmax(Q Kᵀ / √H + bias) V and the softmax, which is computed in float32 (section 3.2.1).

    Has everything: weights, bias, dropout. A query that may see no key gets weights and output 0.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(x, group, axis=1) if group > 1 else x for x in (key, value))
    scores = scaled_dot(query, key)
    scores = scores if bias is None else scores + bias.astype(scores.dtype)
    weights = masked_softmax(scores, dense_mask(mask, query.shape[2], key.shape[2]))
    return weighted_sum(weights if dropout is None else dropout(weights), value), weights


KERNELS: dict[str, Kernel] = {
    "reference": reference,
    "blockwise": blockwise,
    "xla": vendor.xla,
    "cudnn": vendor.cudnn,
    "pallas": vendor.pallas,
}


def find_kernel(name: str) -> Kernel:
    """A kernel by its name, or a function of yours by MODULE:FUNCTION. ValueError: no such one."""
    if ":" not in name:
        if name not in KERNELS:
            raise ValueError(f"kernel {name!r}: unknown{did_you_mean(name, ['auto', *KERNELS])}")
        return KERNELS[name]
    return load_function("kernel", name)


def check_kernel(name: str) -> None:
    """ValueError: there is no kernel of this name, or it does not run here."""
    if name != "auto":
        vendor.require_platform(name)
        find_kernel(name)


def load_function(what: str, name: str) -> Callable[..., Any]:
    """The function MODULE:FUNCTION, which a user has named; ValueError: there is none."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"{what} {name!r}: must be MODULE:FUNCTION")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f"{what} {name!r}: cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"{what} {name!r}: is not a function")
    return _guarded(what, name, found)


def _guarded(what: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a ValueError that names it for whatever it raises."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            raise ValueError(f"{what} {name!r}: {type(error).__name__}: {first}") from error

    return call


def attend(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B G S H"],
    value: Float[Array, "B G S H"],
    mask: AnyMask = None,
    *,
    bias: Float[Array, "#B #N #T S"] | None = None,
    kernel: str | Kernel = "auto",
    dropout: Dropout | None = None,
) -> tuple[Float[Array, "B N T H"], Array | None]:
    """Each query's mean of the values, weighted by how its query matches their keys.

    Each of the G heads of keys and values serves N / G heads of queries; `bias` is finite. Returns
    the output and the weights [B, N, T, S] before dropout, which only the kernel "reference" has.
    ValueError: shapes that do not match, an unknown kernel, or one asked for what it cannot do.
    """
    ranks = query.ndim == key.ndim == 4
    if not ranks or key.shape != value.shape or query.shape[::3] != key.shape[::3]:
        raise ValueError(
            f"query {query.shape}, key {key.shape}, value {value.shape}: must be [B, N, T, H], "
            "[B, G, S, H] and [B, G, S, H]"
        )
    heads, shared = query.shape[1], key.shape[1]
    if heads % shared:
        raise ValueError(f"{heads} query heads: must be a multiple of the {shared} key heads")
    if kernel == "auto":
        kernel = choose(query.shape, key.shape, mask, bias is not None, dropout is not None)
    run = find_kernel(kernel) if isinstance(kernel, str) else kernel
    match run(query, key, value, mask, bias=bias, dropout=dropout):
        case (jax.Array() as output, (jax.Array() | None) as weights) if (
            output.shape == query.shape
            and (weights is None or weights.shape == (*query.shape[:3], key.shape[2]))
        ):
            return output, weights
        case (jax.Array() as output, other):
            found = f"{output.shape} and {getattr(other, 'shape', type(other).__name__)}"
        case (other, _):
            found = f"{type(other).__name__} as output"
        case jax.Array() as other:
            found = f"an array of {other.shape}"
        case other:
            found = type(other).__name__
    name = kernel if isinstance(kernel, str) else getattr(kernel, "__qualname__", kernel)
    raise ValueError(
        f"kernel {name!r}: must return (JAX array of {query.shape}, weights or None), not {found}"
    )


def choose(
    query: tuple[Size, ...],
    key: tuple[Size, ...],
    mask: AnyMask = None,
    bias: bool = False,
    dropout: bool = False,
) -> str:
    """The fastest kernel for these shapes on this platform, of those that have what is asked."""
    queries, keys = query[2], key[2]
    if dropout or not isinstance(queries, int) or not isinstance(keys, int):
        return "reference"
    if jax.default_backend() != "cpu":
        return "xla"
    if bias or not isinstance(mask, Mask | None):  # which blockwise has not
        return "reference"
    crossing = UNMASKED_CROSSING if mask is None else CROSSING
    return "blockwise" if queries * keys >= crossing else "reference"


CROSSING = 128 * 128
"""Queries times keys from which `blockwise` is faster on a CPU, forward and with the backward pass:
measured with 4 and 8 heads, batches of 1 to 64 and each mask, on two cores of an AMD EPYC."""
UNMASKED_CROSSING = 64 * 64
"""The same without a mask, where it is faster forward and, at batch 8, a fifth slower with the
backward pass: what has no mask is seldom trained."""
