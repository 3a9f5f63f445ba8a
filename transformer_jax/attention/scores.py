"""Score functions, which map queries [..., T, H] and keys [..., S, H] to scores [..., T, S].

In formulas, q and k are one query and one key, and capitals and v are learned. Parameters are cast
to the type of the query; the scores are in float32.

To add a score function for layers: write its `prepare` function and list it in `SCORES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float, Int

from transformer_jax.config import OR_YOUR_OWN, did_you_mean
from transformer_jax.errors import UserError


def dot(query: Float[Array, "*B T H"], keys: Float[Array, "*B S H"]) -> Float[Array, "*B T S"]:
    """Returns q·k (Luong et al. 2015, section 3.1)."""
    return jnp.einsum("...th,...sh->...ts", query, keys, preferred_element_type=jnp.float32)


def scaled_dot(
    query: Float[Array, "*B T H"], keys: Float[Array, "*B S H"]
) -> Float[Array, "*B T S"]:
    """Returns q·k / √H (Vaswani et al. 2017, section 3.2.1).

    The scale keeps the softmax from saturating.
    """
    return dot(query, keys) * query.shape[-1] ** -0.5


def general(
    query: Float[Array, "*B T H"], keys: Float[Array, "*B S H"], w: Float[Array, "*N H H"]
) -> Float[Array, "*B T S"]:
    """Returns q W k (Luong et al. 2015, section 3.1)."""
    return dot(_project(query, w), keys)


def additive(
    query: Float[Array, "*B T H"],
    keys: Float[Array, "*B S H"],
    w: Float[Array, "*N H H"],
    u: Float[Array, "*N H H"],
    v: Float[Array, "*N H"],
) -> Float[Array, "*B T S"]:
    """Returns v·tanh(W q + U k) (Bahdanau et al. 2015, appendix A.1.2).

    Needs memory for T · S · H elements.
    """
    return added(_project(query, w), _project(keys, u), v)


def added(
    query: Float[Array, "*B T H"], keys: Float[Array, "*B S H"], v: Float[Array, "*N H"]
) -> Float[Array, "*B T S"]:
    """Returns v·tanh(q + k): the `additive` score of projected queries and keys."""
    hidden = jnp.tanh(query[..., :, None, :] + keys[..., None, :, :])
    v = v.astype(hidden.dtype)
    return jnp.einsum("...tsh,...h->...ts", hidden, v, preferred_element_type=jnp.float32)


def location(
    query: Float[Array, "*B T H"],
    key_positions: Int[Array, "*C S"],
    w: Float[Array, "*N H P"],
) -> Float[Array, "*B T S"]:
    """Returns (W q)ₛ for position s, regardless of the key there (Luong et al. 2015, eq. 8)."""
    return dot(query, _location_keys(query, key_positions, w))


def _project(x: Float[Array, "*B T H"], w: Float[Array, "*N H H"]) -> Float[Array, "*B T H"]:
    return x @ w.astype(x.dtype)


def _location_keys(
    query: Float[Array, "*B T H"], positions: Int[Array, "*C S"], w: Float[Array, "*N H P"]
) -> Float[Array, "*B S H"]:
    """Returns the column of `w` of each position, for each of the query's leading axes."""
    axes = query.ndim - 2
    w = jnp.expand_dims(w, range(axes + 2 - w.ndim))
    positions = jnp.expand_dims(positions, range(axes + 1 - positions.ndim))
    columns = jnp.vectorize(lambda w, p: w.T[p], signature="(h,p),(s)->(s,h)")(w, positions)
    columns = columns.astype(query.dtype)
    return jnp.broadcast_to(columns, (*query.shape[:-2], *columns.shape[-2:]))


class Prepared(NamedTuple):
    """Queries and keys after the learned parameters, and the function that computes their scores.

    The function can be applied to any part of the queries and keys.
    """

    query: Float[Array, "*B T H"]
    keys: Float[Array, "*B S H"]
    compare: Partial


@dataclass(frozen=True)
class ScoreEntry:
    """A score function as layers use it.

    `prepare` is called with queries [B, N, T, H], keys [B, N, S, H], the keys' positions [#B, S]
    and the parameters by name. It applies the parameters once per query and once per key, not once
    per pair.
    """

    prepare: Callable[..., Prepared]
    params: Mapping[str, str] = field(default_factory=dict)
    """Learned parameters by name, with their dimensions in each head: H head size, P positions."""
    product: bool = False
    """Whether the score is the scaled dot product of the prepared query and the key itself, which
    every kernel of `attend` computes."""


def _prepare_scaled_dot(query: Array, keys: Array, _: Any) -> Prepared:
    return Prepared(query, keys, Partial(scaled_dot))


def _prepare_dot(query: Array, keys: Array, _: Any) -> Prepared:
    return Prepared(query * query.shape[-1] ** 0.5, keys, Partial(scaled_dot))


def _prepare_general(query: Array, keys: Array, _: Any, w: Array) -> Prepared:
    return _prepare_dot(_project(query, w), keys, _)


def _prepare_additive(query: Array, keys: Array, _: Any, w: Array, u: Array, v: Array) -> Prepared:
    return Prepared(_project(query, w), _project(keys, u), Partial(added, v=v))


def _prepare_location(query: Array, _: Any, key_positions: Array, positions: Array) -> Prepared:
    keys = _location_keys(query, key_positions[:, None], positions)
    return Prepared(query, keys, Partial(dot))


SCORES: dict[str, ScoreEntry] = {
    "scaled_dot": ScoreEntry(_prepare_scaled_dot, product=True),
    "dot": ScoreEntry(_prepare_dot, product=True),
    "general": ScoreEntry(_prepare_general, {"w": "H H"}, product=True),
    "additive": ScoreEntry(_prepare_additive, {"w": "H H", "u": "H H", "v": "H"}),
    "location": ScoreEntry(_prepare_location, {"positions": "H P"}),
}


def find_score(field: str, name: str) -> ScoreEntry:
    """Returns the score function `name`. UserError: it is unknown; the message names `field`."""
    if name not in SCORES:
        hint = did_you_mean(name, SCORES) + OR_YOUR_OWN
        raise UserError(f"model.{field}.score={name!r}: unknown{hint}")
    return SCORES[name]
