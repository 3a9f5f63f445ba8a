"""Dense layers of all models, whose matmuls are those of two matrices.

From inputs of three dimensions, XLA on a CPU computes the gradient of a kernel much more slowly
than from the same inputs as a matrix.
"""

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array

from transformer_jax.config import ModelConfig


def dense(
    config: ModelConfig,
    features: int | Sequence[int],
    *,
    axis: int | Sequence[int] = -1,
    name: str | None = None,
    bias: bool | None = None,
) -> nn.DenseGeneral:
    """Returns a linear layer from the dimensions `axis` to `features`.

    bias: whether it has one; None: as `model.bias` says.
    Parameters are float32 and initialized as by Glorot and Bengio (2010); the product is computed
    in `model.dtype`.
    """
    return nn.DenseGeneral(
        features,
        axis=axis,
        use_bias=config.bias if bias is None else bias,
        dtype=jnp.dtype(config.dtype),
        kernel_init=nn.initializers.xavier_uniform(),
        dot_general_cls=lambda: _matmul,
        name=name,
    )


def multiply(x: Array, matrix: Array, contracted: int = 1, dtype: Any = None) -> Array:
    """Returns the product of the last dimensions of `x` with the first ones of `matrix`.

    contracted: the number of these dimensions. dtype: the type of the result; None: that of `x`.
    """
    kept, features = x.shape[: x.ndim - contracted], matrix.shape[contracted:]
    inputs = matrix.reshape(math.prod(matrix.shape[:contracted]), -1)
    product = jnp.matmul(x.reshape(-1, inputs.shape[0]), inputs, preferred_element_type=dtype)
    return product.reshape(*kept, *features)


def _matmul(x: Array, kernel: Array, dimensions: Any, **_: Any) -> Array:
    """Returns the product that `nn.DenseGeneral` asks for, whose `axis` are the last dimensions."""
    return multiply(x, kernel, len(dimensions[0][0]))
