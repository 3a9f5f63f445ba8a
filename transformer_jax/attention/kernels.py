"""Dispatches attention to a kernel (`attend`) and selects the kernel for `auto` (`choose`).

Arrays have heads before length, [B, N, T, H]. On a CPU, products then run on contiguous matrices
and are up to four times faster than with length before heads.

To add a kernel: write a file with its function and `KernelEntry`, and list the entry in `KERNELS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from transformer_jax.attention.blockwise import BLOCKWISE
from transformer_jax.attention.dot_product import CUDNN, XLA, suits_cudnn
from transformer_jax.attention.kernel_entry import FEATURES, KernelEntry
from transformer_jax.attention.masks import AnyMask, Mask
from transformer_jax.attention.pallas import PALLAS
from transformer_jax.attention.reference import REFERENCE, Dropout
from transformer_jax.config import did_you_mean
from transformer_jax.errors import UserError
from transformer_jax.user_code import is_function_name, load_function

Kernel = Callable[..., tuple[Array, Array | None]] | KernelEntry
"""(query, key, value, mask, *, bias, dropout) -> (output, attention weights or None), or an entry
that says what such a function supports."""

KERNELS: dict[str, KernelEntry] = {
    entry.name: entry for entry in (REFERENCE, BLOCKWISE, XLA, CUDNN, PALLAS)
}


def find_kernel(kernel: str | Kernel) -> KernelEntry:
    """Returns the entry of a kernel: one of `KERNELS`, MODULE:FUNCTION, a function, or the entry.

    A user's function is assumed to support every feature. UserError: the kernel is unknown.
    """
    if isinstance(kernel, KernelEntry):
        return kernel
    if not isinstance(kernel, str):
        name = getattr(kernel, "__qualname__", str(kernel))
        return KernelEntry(name, kernel, features=frozenset(FEATURES))
    if is_function_name(kernel):
        return KernelEntry(kernel, load_function("kernel", kernel), features=frozenset(FEATURES))
    if kernel not in KERNELS:
        raise UserError(f"kernel {kernel!r}: unknown{did_you_mean(kernel, ['auto', *KERNELS])}")
    return KERNELS[kernel]


def check_kernel(name: str, needs: Mapping[str, str], dtype: str) -> None:
    """Checks that the kernel exists, runs on this platform and supports what a model needs.

    needs: features of `FEATURES`, each with the setting that needs it, such as
    "model.positions='alibi'". dtype: the type that the model computes in. UserError: a check fails.
    """
    if name == "auto":
        return
    entry = find_kernel(name)
    for feature, setting in needs.items():
        if feature not in entry.features:
            *others, last = [k.name for k in KERNELS.values() if feature in k.features]
            raise UserError(
                f"execution.kernel={name!r}: must be {', '.join(['auto', *others])} or {last} "
                f"with {setting}: this kernel does not support {FEATURES[feature]}"
            )
    _require_platform(entry)
    if entry.dtypes and dtype not in entry.dtypes:
        known = " or ".join(entry.dtypes)
        raise UserError(
            f"execution.kernel={name!r}: computes in {known}, not in model.dtype={dtype!r}; use xla"
        )


def has_weights(kernel: str | Kernel) -> bool:
    """Returns whether the kernel computes attention weights; `auto` does not promise them."""
    return kernel != "auto" and "weights" in find_kernel(kernel).features


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
    """Returns softmax(Q Kᵀ / √H + bias) V and, if the kernel has them, the attention weights.

    Each of the G heads of keys and values serves N / G query heads. `bias` must be finite. The
    output has the query's type. The weights [B, N, T, S] are those before dropout; None: the kernel
    does not compute them. UserError: the shapes do not match, or the kernel is unknown or does not
    support the arguments.
    """
    ranks = query.ndim == key.ndim == 4
    if not ranks or key.shape != value.shape or query.shape[::3] != key.shape[::3]:
        raise UserError(
            f"query {query.shape}, key {key.shape}, value {value.shape}: must be [B, N, T, H], "
            "[B, G, S, H] and [B, G, S, H]"
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads % kv_heads:
        raise UserError(f"{heads} query heads: must be a multiple of the {kv_heads} key heads")
    if isinstance(mask, Mask) and mask.visible is not None:
        mask = mask.dense(query.shape[2], key.shape[2])
    if kernel == "auto":
        kernel = choose(query, key, mask, bias=bias is not None, dropout=dropout is not None)
    entry = find_kernel(kernel)
    needs = _needs(mask, bias=bias is not None, dropout=dropout is not None)
    _require(entry, needs, query.dtype.name)
    options = {"bias": bias, "dropout": dropout}
    options = {name: value for name, value in options.items() if name in entry.features}
    key, value = key.astype(query.dtype), value.astype(query.dtype)
    result = entry.function(query, key, value, mask, **options)
    output, weights = _checked(entry.name, result, query, key)
    return output.astype(query.dtype), weights


def _needs(mask: AnyMask, *, bias: bool, dropout: bool) -> frozenset[str]:
    """Returns the features that a call needs."""
    rule = mask if isinstance(mask, Mask) else Mask()
    needs = {
        "bias": bias,
        "dropout": dropout,
        "window": rule.window is not None,
        "unaligned_causal": rule.causal and not rule.aligned,
        "dense_mask": not isinstance(mask, Mask | None),
    }
    return frozenset(name for name, needed in needs.items() if needed)


def _require(entry: KernelEntry, needs: frozenset[str], dtype: str) -> None:
    for feature, phrase in FEATURES.items():
        if feature in needs - entry.features:
            raise UserError(f"kernel {entry.name}: does not support {phrase}; use kernel reference")
    _require_platform(entry)
    if entry.dtypes and dtype not in entry.dtypes:
        known = " or ".join(entry.dtypes)
        raise UserError(f"kernel {entry.name}: computes in {known}, not {dtype}; use xla")


def _require_platform(entry: KernelEntry) -> None:
    platform = jax.default_backend()
    if entry.platforms and platform not in entry.platforms:
        known = " or ".join(entry.platforms)
        raise UserError(f"kernel {entry.name}: runs on {known}, not on {platform}; use xla")


def _checked(name: str, result: Any, query: Array, key: Array) -> tuple[Array, Array | None]:
    """Returns a kernel's result. UserError: it is not an output with attention weights or None."""
    match result:
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
    raise UserError(
        f"kernel {name!r}: must return (JAX array of {query.shape}, weights or None), not {found}"
    )


def choose(
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    mask: AnyMask = None,
    *,
    bias: bool = False,
    dropout: bool = False,
) -> str:
    """Returns the name of the kernel that `auto` selects.

    On a CPU, the choice between `reference` and `blockwise` follows measurements. On other
    platforms nothing has been measured: it is `cudnn` if cuDNN supports this attention and its
    gradient, unless there is a bias, which cuDNN would add in half precision; otherwise it is
    `xla`. It is `reference` if that kernel lacks a feature that the call needs, such as dropout, or
    if a length is symbolic.
    """
    if isinstance(query.shape[2], int) and isinstance(key.shape[2], int):
        needs = _needs(mask, bias=bias, dropout=dropout)
        for name in _preferred(query, key, mask, bias):
            if needs <= KERNELS[name].features:
                return name
    return "reference"


def _preferred(
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    mask: AnyMask,
    bias: bool,
) -> Iterator[str]:
    """Yields the kernels to prefer over `reference` on this platform, the fastest first."""
    platform = jax.default_backend()
    if platform == "cpu":
        crossover = CPU_CROSSOVER_UNMASKED if mask is None else CPU_CROSSOVER
        if query.shape[2] * key.shape[2] >= crossover:
            yield "blockwise"
        return
    if platform == "gpu" and not bias and suits_cudnn(query, key, mask):
        yield "cudnn"
    yield "xla"


CPU_CROSSOVER = 128 * 128
"""Number of queries times keys from which `blockwise` is faster than `reference` on a CPU, with and
without the backward pass. Measured by `transformer-jax bench attention` with 4 and 8 heads, batches
of 1 to 64 and each mask, on two cores of an AMD EPYC."""
CPU_CROSSOVER_UNMASKED = 64 * 64
"""The same for calls without a mask. From here on, the forward pass is faster. With the backward
pass, `blockwise` is a fifth slower at batch 8, which matters little, since training nearly always
has a mask."""
