"""Makes the dense layers of all models."""

from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp

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
        name=name,
    )
