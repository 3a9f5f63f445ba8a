"""The one door to attention, `attend`, and the kernels behind it.

Heads stand before length, [B, N, T, H]: on a CPU the products then run on contiguous matrices and
are up to four times faster than with length before heads.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Dropout = Callable[[Array], Array]
"""Applied to the attention weights [B, N, T, S] in training."""


Kernel = Callable[[Array, Array, Array, Array | None, Dropout | None], tuple[Array, Array | None]]
"""(query, key, value, mask, dropout) -> (output, weights or None where it has none)."""


def reference(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B N S H"],
    value: Float[Array, "B N S H"],
    mask: Bool[Array, "#B #N #T S"] | None,
    dropout: Dropout | None = None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T S"]]:
    """softmax(Q Kᵀ / √H) V and the softmax, which is computed in float32 (section 3.2.1, eq. 1).

    A query that may see no key gets weights and output 0.
    """
    scores = jnp.einsum("bnth,bnsh->bnts", query, key, preferred_element_type=jnp.float32)
    scores = scores * query.shape[-1] ** -0.5
    if mask is None:
        weights = jax.nn.softmax(scores)
    else:
        weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
        weights = jnp.where(jnp.any(mask, axis=-1, keepdims=True), weights, 0)
    used = weights if dropout is None else dropout(weights)
    return jnp.einsum("bnts,bnsh->bnth", used.astype(value.dtype), value), weights


def attend(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B N S H"],
    value: Float[Array, "B N S H"],
    mask: Bool[Array, "#B #N #T S"] | None,
    *,
    kernel: Kernel = reference,
    dropout: Dropout | None = None,
) -> tuple[Float[Array, "B N T H"], Array | None]:
    """Each query's mean of the values, weighted by how its query matches their keys.

    Returns the output and the kernel's weights [B, N, T, S] before dropout, if it computes them.
    """
    return kernel(query, key, value, mask, dropout)
