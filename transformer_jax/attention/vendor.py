"""Kernels that come with JAX: `jax.nn.dot_product_attention` by XLA or cuDNN, and Pallas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from transformer_jax.attention.masks import Mask, dense_mask

_BLOCK = 128
"""Queries and keys in a block of JAX's Pallas kernel for GPUs."""


def xla(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B G S H"],
    value: Float[Array, "B G S H"],
    mask: Mask | Bool[Array, "#B #N #T S"] | None = None,
    *,
    bias: Float[Array, "#B #N #T S"] | None = None,
    dropout: Any = None,
) -> tuple[Float[Array, "B N T H"], None]:
    """`jax.nn.dot_product_attention`, as XLA compiles it. No dropout."""
    _refuse("xla", dropout=dropout)
    return _dot_product(query, key, value, mask, bias, "xla"), None


def cudnn(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B G S H"],
    value: Float[Array, "B G S H"],
    mask: Mask | Bool[Array, "#B #N #T S"] | None = None,
    *,
    bias: Float[Array, "#B #N #T S"] | None = None,
    dropout: Any = None,
) -> tuple[Float[Array, "B N T H"], None]:
    """`jax.nn.dot_product_attention` by cuDNN: on NVIDIA GPUs, in bfloat16. No dropout."""
    _refuse("cudnn", dropout=dropout)
    require_platform("cudnn")
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"kernel cudnn: computes in bfloat16, not {query.dtype}; use xla")
    return _dot_product(query, key, value, mask, bias, "cudnn"), None


def pallas(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B G S H"],
    value: Float[Array, "B G S H"],
    mask: Mask | Bool[Array, "#B #N #T S"] | None = None,
    *,
    bias: Float[Array, "#B #N #T S"] | None = None,
    dropout: Any = None,
) -> tuple[Float[Array, "B N T H"], None]:
    """JAX's own flash attention in Pallas, on GPUs and TPUs. Segments and causal masks only."""
    _refuse("pallas", dropout=dropout, bias=bias)
    platform = require_platform("pallas")
    if not isinstance(mask, Mask | None) or (mask is not None and mask.window is not None):
        raise ValueError("kernel pallas: has no windows and no dense masks; use xla or blockwise")
    mask = Mask() if mask is None else mask
    if mask.causal and not mask.aligned:
        raise ValueError("kernel pallas: is causal by index, not by position; use xla or reference")
    group = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(x, group, axis=1) for x in (key, value))
    queries, keys = _segments(mask, query, key)
    run = _pallas_tpu if platform == "tpu" else _pallas_gpu
    output = run(query, key, value, queries, keys, mask)
    some = jnp.any(queries[:, :, None] == keys[:, None, :], axis=-1) & (queries > 0)
    return jnp.where(some[:, None, :, None], output, 0), None


def _pallas_tpu(
    query: Array, key: Array, value: Array, queries: Array, keys: Array, mask: Mask
) -> Array:
    from jax.experimental.pallas.ops.tpu import flash_attention as tpu

    ids, scale = tpu.SegmentIds(queries, keys), query.shape[-1] ** -0.5
    with _refusals():
        return tpu.flash_attention(
            query, key, value, segment_ids=ids, causal=mask.causal, sm_scale=scale
        )


def _pallas_gpu(
    query: Array, key: Array, value: Array, queries: Array, keys: Array, mask: Mask
) -> Array:
    from jax.experimental.pallas.ops.gpu import attention as gpu

    if query.shape[2] != key.shape[2] or mask.query_segments is not mask.key_segments:
        raise ValueError(
            "kernel pallas: on GPUs needs the same segments for queries and keys, as in packed "
            "self-attention; use xla or cudnn"
        )
    if query.shape[2] > _BLOCK and query.shape[2] % _BLOCK:
        raise ValueError(
            f"kernel pallas: length {query.shape[2]}: must be a multiple of {_BLOCK} on GPUs; "
            "use xla or cudnn"
        )
    by_length = (x.swapaxes(1, 2) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5
    with _refusals():
        found: Any = gpu.mha(*by_length, queries, sm_scale=scale, causal=mask.causal)
    return found.swapaxes(1, 2)


@contextmanager
def _refusals() -> Iterator[None]:
    """What JAX's Pallas has not, such as lengths that its blocks do not divide, in one line."""
    try:
        yield
    except (NotImplementedError, ValueError) as error:
        raise ValueError(f"kernel pallas: {error}; use xla") from error


def _segments(mask: Mask, query: Array, key: Array) -> tuple[Array, Array]:
    """Segments of queries and keys; -1 is padding, which then sees only itself."""

    def known(segments: Array | None, length: int) -> Array:
        if segments is None:
            return jnp.ones((query.shape[0], length), jnp.int32)
        padded = jnp.where(segments > 0, segments, -1)
        return jnp.broadcast_to(padded, (query.shape[0], length))

    return known(mask.query_segments, query.shape[2]), known(mask.key_segments, key.shape[2])


def _dot_product(
    query: Array, key: Array, value: Array, mask: Any, bias: Array | None, implementation: Any
) -> Array:
    seen = dense_mask(mask, query.shape[2], key.shape[2])
    if implementation == "cudnn":  # which does not broadcast over queries
        square = query.shape[2], key.shape[2]
        seen = None if seen is None else jnp.broadcast_to(seen, (*seen.shape[:2], *square))
        bias = None if bias is None else jnp.broadcast_to(bias, (*bias.shape[:2], *square))
    by_length = (x.swapaxes(1, 2) for x in (query, key, value))
    try:
        found = jax.nn.dot_product_attention(
            *by_length, bias=bias, mask=seen, implementation=implementation
        ).swapaxes(1, 2)
    except NotImplementedError as error:  # such as odd lengths, which cuDNN cannot train on
        raise ValueError(f"kernel {implementation}: {error}; use xla") from error
    return found if seen is None else jnp.where(jnp.any(seen, -1, keepdims=True), found, 0)


def _refuse(name: str, **options: Any) -> None:
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"kernel {name}: has no {option}; use kernel reference")


PLATFORMS = {"cudnn": ("gpu",), "pallas": ("gpu", "tpu")}
"""Where kernels run that do not run everywhere."""


def require_platform(name: str) -> str:
    """JAX's platform. ValueError: the kernel does not run there."""
    found = jax.default_backend()
    platforms = PLATFORMS.get(name, (found,))
    if found not in platforms:
        raise ValueError(
            f"kernel {name}: runs on {' or '.join(platforms)}, not on {found}; use xla"
        )
    return found
