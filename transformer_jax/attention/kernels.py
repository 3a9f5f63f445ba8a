"""Dispatches attention to a kernel (`attend`) and selects the kernel for `auto` (`choose`).

Arrays have heads before length, [B, N, T, H]. On a CPU, matmuls then run on contiguous matrices and
are up to four times faster than with length before heads.

To add a kernel, write a file with its function and list it in `KERNELS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float

from transformer_jax.attention.blockwise import blockwise
from transformer_jax.attention.dot_product import CUDNN_DTYPES, Shaped, cudnn, suits_cudnn, xla
from transformer_jax.attention.functional import ContextAndWeights
from transformer_jax.attention.masks import AnyMask, Mask
from transformer_jax.attention.pallas import pallas
from transformer_jax.attention.reference import reference
from transformer_jax.config import did_you_mean
from transformer_jax.errors import UserError
from transformer_jax.types import Heads, KVHeads
from transformer_jax.user_code import is_function_name, load_function

FEATURES = {
    "bias": "a bias",
    "dropout": "dropout",
    "weights": "attention weights",
    "window": "windows",
    "dense_mask": "dense masks",
    "unaligned_causal": "causal masks whose positions differ from the indices",
}
"""Features that a call may need of a kernel, each with its name in error messages."""

MASKS_AND_BIAS = frozenset({"bias", "window", "dense_mask", "unaligned_causal"})


@dataclass(frozen=True)
class Kernel:
    """A kernel: its name, its function and what it supports; by default every feature.

    `function` is called with query, key, value and mask, and with the keywords `bias` and `dropout`
    if the kernel has these features. It returns a `ContextAndWeights`, or a plain pair of the same;
    the weights are None if it does not have that feature.
    """

    name: str
    function: Callable[..., tuple[Array, Array | None]]
    features: frozenset[str] = frozenset(FEATURES)
    dtypes: tuple[str, ...] = ()
    """Supported types of the query; empty: all."""
    platforms: tuple[str, ...] = ()
    """JAX platforms that it runs on; empty: all."""

    def __post_init__(self) -> None:
        assert self.features <= set(FEATURES), self.features


AnyKernel = str | Kernel | Callable[..., tuple[Array, Array | None]]
"""The name of a kernel, a kernel, or the function of one that supports every feature."""

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("reference", reference),
        Kernel("blockwise", blockwise, frozenset({"window", "unaligned_causal"})),
        Kernel("xla", xla, MASKS_AND_BIAS),
        Kernel("cudnn", cudnn, MASKS_AND_BIAS, CUDNN_DTYPES, platforms=("gpu",)),
        Kernel("pallas", pallas, frozenset(), platforms=("tpu",)),
    )
}


def find_kernel(kernel: AnyKernel) -> Kernel:
    """Returns a kernel by its name in `KERNELS`, as MODULE:FUNCTION, or by its function.

    UserError: it is unknown.
    """
    if isinstance(kernel, Kernel):
        return kernel
    if not isinstance(kernel, str):
        return Kernel(getattr(kernel, "__qualname__", str(kernel)), kernel)
    if is_function_name(kernel):
        return Kernel(kernel, load_function("kernel", kernel))
    if kernel not in KERNELS:
        raise UserError(f"kernel {kernel!r}: unknown{did_you_mean(kernel, ['auto', *KERNELS])}")
    return KERNELS[kernel]


def check_kernel(kernel: Kernel, needs: dict[str, str], dtype: str, field: str = "kernel") -> None:
    """Checks that a kernel runs on this platform and supports what a call or a model needs.

    needs: features of `FEATURES`, each with what needs it, such as "model.positions='alibi'".
    dtype: the type of the computation. field: names the kernel in messages. UserError: a check
    fails.
    """
    for feature, reason in needs.items():
        if feature not in kernel.features:
            *others, last = [k.name for k in KERNELS.values() if feature in k.features]
            raise UserError(
                f"{field}={kernel.name!r}: does not support {FEATURES[feature]}, which {reason} "
                f"needs; use {', '.join(['auto', *others])} or {last}"
            )
    platform = jax.default_backend()
    if kernel.platforms and platform not in kernel.platforms:
        supported = " or ".join(kernel.platforms)
        raise UserError(f"{field}={kernel.name!r}: runs on {supported}, not on {platform}; use xla")
    if kernel.dtypes and dtype not in kernel.dtypes:
        supported = " or ".join(kernel.dtypes)
        raise UserError(f"{field}={kernel.name!r}: computes in {supported}, not {dtype}; use xla")


def has_weights(kernel: AnyKernel) -> bool:
    """Returns whether the kernel computes attention weights; `auto` does not promise them."""
    return kernel != "auto" and "weights" in find_kernel(kernel).features


def attend(
    query: Heads,
    key: KVHeads,
    value: KVHeads,
    mask: AnyMask = None,
    *,
    bias: Float[Array, "#B #N #T S"] | None = None,
    kernel: AnyKernel = "auto",
    dropout: Callable[[Array], Array] | None = None,
) -> ContextAndWeights:
    """Returns softmax(Q Kᵀ / √H + bias) V and, if the kernel has them, the attention weights.

    Each of the G KV heads serves N / G query heads. `bias` must be finite. The output has the
    query's type. The weights [B, N, T, S] are those before `dropout`, a function that is applied to
    them in training; None: the kernel does not compute them. UserError: the shapes do not match, or
    the kernel is unknown or does not support the arguments.
    """
    ranks = query.ndim == key.ndim == 4
    if not ranks or key.shape != value.shape or query.shape[::3] != key.shape[::3]:
        shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
        raise UserError(f"{shapes}: must be [B, N, T, H], [B, G, S, H] and [B, G, S, H]")
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads % kv_heads:
        raise UserError(f"{heads} query heads: must be a multiple of the {kv_heads} KV heads")
    if isinstance(mask, Mask) and mask.visible is not None:
        mask = mask.dense(query.shape[2], key.shape[2])
    if kernel == "auto":
        kernel = choose(query, key, mask, bias=bias is not None, dropout=dropout is not None)
    kernel = find_kernel(kernel)
    needs = _needs(mask, bias=bias is not None, dropout=dropout is not None)
    check_kernel(kernel, dict.fromkeys(needs, "this call"), query.dtype.name)
    options = {"bias": bias, "dropout": dropout}
    options = {name: value for name, value in options.items() if name in kernel.features}
    key, value = key.astype(query.dtype), value.astype(query.dtype)
    result = kernel.function(query, key, value, mask, **options)
    output, weights = _checked(kernel.name, result, query, key)
    return ContextAndWeights(output.astype(query.dtype), weights)


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


def _checked(name: str, result: Any, query: Array, key: Array) -> ContextAndWeights:
    """Returns a kernel's result. UserError: it is not an output with attention weights or None."""

    def describe(x: Any) -> Any:
        return x.shape if isinstance(x, jax.Array) else type(x).__name__

    returned = [describe(x) for x in (result if isinstance(result, tuple) else [result])]
    weights = (*query.shape[:3], key.shape[2])
    if returned not in ([query.shape, "NoneType"], [query.shape, weights]):
        raise UserError(
            f"kernel {name!r}: must return (JAX array of {query.shape}, weights or None), "
            f"not {' and '.join(map(str, returned))}"
        )
    return ContextAndWeights(*result)


def choose(
    query: Shaped, key: Shaped, mask: AnyMask = None, *, bias: bool = False, dropout: bool = False
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


def _preferred(query: Shaped, key: Shaped, mask: AnyMask, bias: bool) -> list[str]:
    """Returns the kernels to prefer over `reference` on this platform, the fastest first."""
    platform = jax.default_backend()
    if platform == "cpu":
        crossover = CPU_CROSSOVER_UNMASKED if mask is None else CPU_CROSSOVER
        return ["blockwise"] if query.shape[2] * key.shape[2] >= crossover else []
    suits = platform == "gpu" and not bias and suits_cudnn(query, key, mask)
    return ["cudnn", "xla"] if suits else ["xla"]


CPU_CROSSOVER = 128 * 128
"""Number of queries times keys from which `blockwise` is faster than `reference` on a CPU, with and
without the backward pass. Measured by `transformer-jax bench attention` with 4 and 8 heads, batches
of 1 to 64 and each mask, on two cores of an AMD EPYC."""
CPU_CROSSOVER_UNMASKED = 64 * 64
"""The same for calls without a mask. From here on, the forward pass is faster. With the backward
pass, `blockwise` is a fifth slower at batch 8, which matters little, since training nearly always
has a mask."""
