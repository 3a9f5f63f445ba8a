"""The kernel `reference`: the formula of attention, with every feature."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_jax.attention.functional import ContextAndWeights, masked_softmax, weighted_sum
from transformer_jax.attention.masks import AnyMask, dense_mask
from transformer_jax.types import Heads, KVHeads


def reference(
    query: Heads,
    key: KVHeads,
    value: KVHeads,
    mask: AnyMask = None,
    *,
    bias: Float[Array, "#B #N #T S"] | None = None,
    dropout: Callable[[Array], Array] | None = None,
) -> ContextAndWeights:
    """Returns softmax(Q Kᵀ / √H + bias) V and the softmax in float32 (section 3.2.1).

    A query that may attend to no key has weights and output 0. dropout: applied to the weights.
    """
    # The queries of heads that share a KV head are the rows of one matrix: keys are not copied.
    rows = (*key.shape[:2], -1, query.shape[-1])
    scores = jnp.matmul(query.reshape(rows), key.swapaxes(2, 3), preferred_element_type=jnp.float32)
    scores = scores.reshape(*query.shape[:3], key.shape[2]) * query.shape[-1] ** -0.5
    scores = scores if bias is None else scores + bias.astype(scores.dtype)
    weights = masked_softmax(scores, dense_mask(mask, query.shape[2], key.shape[2]))
    dropped = weights if dropout is None else dropout(weights)
    context = weighted_sum(dropped.reshape(*rows[:3], key.shape[2]), value)
    return ContextAndWeights(context.reshape(query.shape), weights)
