"""Parameters as 8-bit integers, with a scale for each output channel."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from transformer_jax.models.parameter_paths import input_dimensions, map_with_paths
from transformer_jax.types import HostOrDeviceArray, Params, map_nodes


class Quantized(NamedTuple):
    """An array that is `values` times `scales`."""

    values: HostOrDeviceArray  # int8, at most 127 in size
    scales: HostOrDeviceArray  # float32, 1 along the dimensions that share a scale


def quantize(params: Params) -> Params:
    """Returns the parameters with `Quantized` matrices of matmuls, embeddings among them.

    Each is rounded to the nearest of 255 values; the largest of a channel is exact. A channel is an
    output of a projection, or the embedding of an id.
    """
    return map_with_paths(_quantize, params)


def dequantize(params: Params) -> Params:
    """Returns the parameters with float32 arrays; those that have no others as they are."""
    return map_nodes(lambda x: x.values.astype(jnp.float32) * x.scales, Quantized, params)


def _quantize(path: str, array: Any) -> Any:
    if (inputs := input_dimensions(path, array.ndim)) is None:
        return array
    largest = jnp.max(jnp.abs(array), axis=inputs, keepdims=True)
    scales = jnp.where(largest > 0, largest / 127, 1.0)
    return Quantized(jnp.round(array / scales).astype(jnp.int8), scales)
