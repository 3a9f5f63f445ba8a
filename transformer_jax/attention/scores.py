"""How well a query matches a key: [..., T, H] and [..., S, H] to [..., T, S].

q and k are one query and one key; what is capital is learned.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def dot(query: Float[Array, "*B T H"], keys: Float[Array, "*B S H"]) -> Float[Array, "*B T S"]:
    """q·k (Luong et al. 2015, section 3.1), in float32."""
    return jnp.einsum("...th,...sh->...ts", query, keys, preferred_element_type=jnp.float32)


def scaled_dot(
    query: Float[Array, "*B T H"], keys: Float[Array, "*B S H"]
) -> Float[Array, "*B T S"]:
    """q·k / √H, so that the softmax does not saturate (Vaswani et al. 2017, section 3.2.1)."""
    return dot(query, keys) * query.shape[-1] ** -0.5


def general(
    query: Float[Array, "*B T H"], keys: Float[Array, "*B S H"], w: Float[Array, "*N H H"]
) -> Float[Array, "*B T S"]:
    """q W k (Luong et al. 2015, section 3.1)."""
    return dot(query @ w, keys)


def additive(
    query: Float[Array, "*B T H"],
    keys: Float[Array, "*B S H"],
    w: Float[Array, "*N H H"],
    u: Float[Array, "*N H H"],
    v: Float[Array, "*N H"],
) -> Float[Array, "*B T S"]:
    """v·tanh(W q + U k), which takes memory T · S · H (Bahdanau et al. 2015, appendix A.1.2)."""
    return added(query @ w, keys @ u, v)


def added(
    query: Float[Array, "*B T H"], keys: Float[Array, "*B S H"], v: Float[Array, "*N H"]
) -> Float[Array, "*B T S"]:
    """v·tanh(q + k), of W q and U k: `additive`."""
    hidden = jnp.tanh(query[..., :, None, :] + keys[..., None, :, :])
    return jnp.einsum("...tsh,...h->...ts", hidden, v, preferred_element_type=jnp.float32)


def location(
    query: Float[Array, "*B T H"],
    key_positions: Int[Array, "*C S"],
    w: Float[Array, "*N H P"],
) -> Float[Array, "*B T S"]:
    """W q at the key's position, of P, whatever stands there (Luong et al. 2015, eq. 8)."""
    by_position = (query @ w).astype(jnp.float32)
    index = jnp.broadcast_to(
        key_positions[..., None, :], (*by_position.shape[:-1], key_positions.shape[-1])
    )
    return jnp.take_along_axis(by_position, index, axis=-1)
