"""The kernels `xla` and `cudnn`: the two implementations of `jax.nn.dot_product_attention`."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_jax.attention.functional import ContextAndWeights
from transformer_jax.attention.masks import AnyMask, dense_mask
from transformer_jax.errors import UserError
from transformer_jax.types import Heads, KVHeads

CUDNN_DTYPES = ("bfloat16", "float16")
"""Types in which cuDNN computes attention."""

Shaped = jax.Array | jax.ShapeDtypeStruct
"""An array, or its shape and type."""


def dot_product(
    query: Heads,
    key: KVHeads,
    value: KVHeads,
    mask: AnyMask = None,
    *,
    bias: Float[Array, "#B #N #T S"] | None = None,
    implementation: Literal["xla", "cudnn"],
) -> ContextAndWeights:
    """Returns the output of `jax.nn.dot_product_attention`, and None for the weights."""
    queries, keys = query.shape[2], key.shape[2]
    visible = dense_mask(mask, queries, keys)
    if implementation == "cudnn":  # cuDNN does not broadcast masks and biases over queries
        if visible is not None:
            visible = jnp.broadcast_to(visible, (*visible.shape[:2], queries, keys))
        if bias is not None:
            bias = jnp.broadcast_to(bias, (*bias.shape[:2], queries, keys))
    length_first = (x.swapaxes(1, 2) for x in (query, key, value))
    try:
        output = jax.nn.dot_product_attention(
            *length_first, bias=bias, mask=visible, implementation=implementation
        ).swapaxes(1, 2)
    except NotImplementedError as error:  # cuDNN has no gradient for odd lengths with a mask
        raise UserError(f"kernel {implementation}: {error}; use xla") from error
    if visible is None:
        return ContextAndWeights(output, None)
    return ContextAndWeights(jnp.where(jnp.any(visible, -1, keepdims=True), output, 0), None)


xla = partial(dot_product, implementation="xla")
cudnn = partial(dot_product, implementation="cudnn")


def suits_cudnn(query: Shaped, key: Shaped, mask: AnyMask) -> bool:
    """Returns whether cuDNN supports this attention and its gradient on this GPU.

    The conditions are those of `jax.nn.dot_product_attention`: a head size that is a multiple of 8
    and at most 128, an NVIDIA GPU of compute capability 8.0 or later and, with a mask, even
    lengths.
    """
    (*_, queries, head_size), keys = query.shape, key.shape[2]
    even = mask is None or (queries % 2 == 0 and keys % 2 == 0)
    # "9.0" on an NVIDIA GPU; a name such as "gfx942" on other GPUs
    major = str(getattr(jax.devices()[0], "compute_capability", "")).partition(".")[0]
    recent = major.isdigit() and int(major) >= 8
    half = query.dtype.name in CUDNN_DTYPES
    return half and recent and even and head_size % 8 == 0 and head_size <= 128
