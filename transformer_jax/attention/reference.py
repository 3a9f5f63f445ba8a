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
    group = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(x, group, axis=1) if group > 1 else x for x in (key, value))
    scores = jnp.einsum("bnth,bnsh->bnts", query, key, preferred_element_type=jnp.float32)
    scores = scores * query.shape[-1] ** -0.5
    scores = scores if bias is None else scores + bias.astype(scores.dtype)
    weights = masked_softmax(scores, dense_mask(mask, query.shape[2], key.shape[2]))
    dropped = weights if dropout is None else dropout(weights)
    return ContextAndWeights(weighted_sum(dropped, value), weights)
