"""The kernel `reference`: the formula of attention, with every feature."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_jax.attention.kernel_entry import FEATURES, KernelEntry
from transformer_jax.attention.kinds import masked_softmax, weighted_sum
from transformer_jax.attention.masks import AnyMask, dense_mask
from transformer_jax.attention.scores import scaled_dot

Dropout = Callable[[Array], Array]
"""A function that is applied to the attention weights [B, N, T, S] in training."""


def reference(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B G S H"],
    value: Float[Array, "B G S H"],
    mask: AnyMask = None,
    *,
    bias: Float[Array, "#B #N #T S"] | None = None,
    dropout: Dropout | None = None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T S"]]:
    """Returns softmax(Q Kᵀ / √H + bias) V and the softmax in float32 (section 3.2.1).

    A query that may attend to no key has weights and output 0.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(x, group, axis=1) if group > 1 else x for x in (key, value))
    scores = scaled_dot(query, key)
    scores = scores if bias is None else scores + bias.astype(scores.dtype)
    weights = masked_softmax(scores, dense_mask(mask, query.shape[2], key.shape[2]))
    return weighted_sum(weights if dropout is None else dropout(weights), value), weights


REFERENCE = KernelEntry("reference", reference, features=frozenset(FEATURES))
