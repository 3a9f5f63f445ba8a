"""Score functions, which map queries [..., T, H] and keys [..., S, H] to scores [..., T, S].

In formulas, q and k are one query and one key, and capitals and v are learned. Parameters are cast
to the type of the query; the scores are in float32.

To add a score function for layers, write its `prepare` function and list it in `SCORES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Queries = Float[Array, "*B T H"]
Keys = Float[Array, "*B S H"]
"""Keys, or values."""
Weights = Float[Array, "*B T S"]
"""Scores, or attention weights."""
Matrix = Float[Array, "*N H H"]
Columns = Float[Array, "*N H P"]
Vector = Float[Array, "*N H"]
"""Parameters of each head."""


def dot(query: Queries, keys: Keys) -> Weights:
    """Returns q·k (Luong et al. 2015, section 3.1)."""
    # A product of matrices, which XLA computes without a copy of a cache whose positions are last.
    return jnp.matmul(query, keys.swapaxes(-1, -2), preferred_element_type=jnp.float32)


def scaled_dot(query: Queries, keys: Keys) -> Weights:
    """Returns q·k / √H (Vaswani et al. 2017, section 3.2.1).

    The scale keeps the softmax from saturating.
    """
    return dot(query, keys) * query.shape[-1] ** -0.5


def general(query: Queries, keys: Keys, w: Matrix) -> Weights:
    """Returns q W k (Luong et al. 2015, section 3.1)."""
    return dot(_project(query, w), keys)


def additive(query: Queries, keys: Keys, w: Matrix, u: Matrix, v: Vector) -> Weights:
    """Returns v·tanh(W q + U k) (Bahdanau et al. 2015, appendix A.1.2).

    Needs memory for T · S · H elements.
    """
    return added(_project(query, w), _project(keys, u), v)


def added(query: Queries, keys: Keys, v: Vector) -> Weights:
    """Returns v·tanh(q + k): the `additive` score of projected queries and keys."""
    hidden = jnp.tanh(query[..., :, None, :] + keys[..., None, :, :])
    v = v.astype(hidden.dtype)
    return jnp.einsum("...tsh,...h->...ts", hidden, v, preferred_element_type=jnp.float32)


def location(query: Queries, key_positions: Int[Array, "*C S"], w: Columns) -> Weights:
    """Returns (W q)ₛ for position s, regardless of the key there (Luong et al. 2015, eq. 8)."""
    return dot(query, _location_keys(query, key_positions, w))


def _project(x: Queries, w: Matrix) -> Queries:
    return x @ w.astype(x.dtype)


def _location_keys(query: Queries, positions: Int[Array, "*C S"], w: Columns) -> Keys:
    """Returns the column of `w` of each position, for each of the query's leading axes."""
    axes = query.ndim - 2
    w = jnp.expand_dims(w, range(axes + 2 - w.ndim))
    positions = jnp.expand_dims(positions, range(axes + 1 - positions.ndim))
    columns = jnp.vectorize(lambda w, p: w.T[p], signature="(h,p),(s)->(s,h)")(w, positions)
    columns = columns.astype(query.dtype)
    return jnp.broadcast_to(columns, (*query.shape[:-2], *columns.shape[-2:]))


@dataclass(frozen=True)
class Score:
    """A score function as layers use it: `compare` of the queries and keys that `prepare` returns.

    prepare: called with queries [B, N, T, H], keys [B, N, S, H], the keys' positions [#B, S] and
    the parameters `params` by name. It applies these once per query and once per key, not once per
    pair. compare: called with the two arrays that `prepare` returns, or with any part of them, and
    with the parameters `compare_params` by name. Parameters are declared with their dimensions in
    each head: H head size, P positions.
    """

    prepare: Callable[..., tuple[Array, Array]]
    compare: Callable[..., Array] = scaled_dot
    params: Mapping[str, str] = field(default_factory=dict)
    compare_params: Mapping[str, str] = field(default_factory=dict)

    @property
    def product(self) -> bool:
        """Whether the score is a scaled dot product, which every kernel of `attend` computes."""
        return self.compare is scaled_dot


def _prepare_dot(query: Array, keys: Array, _: Any) -> tuple[Array, Array]:
    return query * query.shape[-1] ** 0.5, keys  # `scaled_dot` divides by the same number


def _prepare_general(query: Array, keys: Array, _: Any, w: Array) -> tuple[Array, Array]:
    return _prepare_dot(_project(query, w), keys, _)


def _prepare_additive(query: Array, keys: Array, _: Any, w: Array, u: Array) -> tuple[Array, Array]:
    return _project(query, w), _project(keys, u)


def _prepare_location(query: Array, _: Any, at: Array, positions: Array) -> tuple[Array, Array]:
    return query, _location_keys(query, at[:, None], positions)


SCORES: dict[str, Score] = {
    "scaled_dot": Score(lambda query, keys, _: (query, keys)),
    "dot": Score(_prepare_dot),
    "general": Score(_prepare_general, params={"w": "H H"}),
    "additive": Score(_prepare_additive, added, {"w": "H H", "u": "H H"}, {"v": "H"}),
    "location": Score(_prepare_location, dot, {"positions": "H P"}),
}
