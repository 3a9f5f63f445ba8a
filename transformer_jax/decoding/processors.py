"""What a search prefers: logits processors, and length penalties.

A `Processor` returns the log probabilities of the next id that the search ranks by, at most 0, and
-inf for an id that may not follow. It does not renormalize. Scores that are reported are the
model's own. A function with parameters becomes a processor by `functools.partial`.

A `LengthPenalty` maps the log probability of a hypothesis and its length, end symbol included, to
its score. It increases with the log probability, and for a fixed one it is monotonic in the length.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from transformer_jax.special_ids import PAD

LogProbs = Float[Array, "B K V"]


class Sentences(NamedTuple):
    """What a search is told about each sentence. A field that no part of it reads may be None."""

    max_length: Int[Array, " B"]  # largest number of ids, end symbol included; 0: no output
    min_length: Int[Array, " B"] | None = None  # least number of ids before the end symbol
    prefix: Int[Array, "B P"] | None = None  # the first ids of each output, `PAD` after them
    keys: UInt32[Array, "B _"] | None = None  # data of the rngs of samples
    phrases: Int[Array, "B P L"] | None = None  # that each output must hold, `PAD` after them
    candidates: Int[Array, " C"] | None = None  # the target ids that are scored; None: all
    allowed: Bool[Array, "B C"] | None = None  # which of the candidates each output may hold


class SearchContext(NamedTuple):
    """What a processor may depend on besides the log probabilities that it changes."""

    position: Int[Array, ""]  # number of ids so far
    ids: Int[Array, "B K T"]  # the ids so far, `PAD` after them
    log_probs: LogProbs  # the model's own
    sentences: Sentences


Processor = Callable[[LogProbs, SearchContext], LogProbs]


def suppress(log_probs: LogProbs, _: SearchContext, *, ids: Sequence[int]) -> LogProbs:
    """Forbids `ids`."""
    forbidden = jnp.zeros(log_probs.shape[-1], bool).at[jnp.asarray(ids)].set(True)
    return jnp.where(forbidden, -jnp.inf, log_probs)


NO_PADDING = partial(suppress, ids=(PAD,))


def at_least_min_length(log_probs: LogProbs, context: SearchContext, *, end_id: int) -> LogProbs:
    """Forbids the end symbol before `Sentences.min_length` ids."""
    assert context.sentences.min_length is not None
    early = context.position < context.sentences.min_length[:, None]
    is_end = (jnp.arange(log_probs.shape[-1]) == end_id)[None, None, :]
    return jnp.where(early[..., None] & is_end, -jnp.inf, log_probs)


def no_repeat_ngrams(log_probs: LogProbs, context: SearchContext, *, size: int) -> LogProbs:
    """Forbids an id that would repeat `size` ids of the hypothesis.

    (Paulus et al. 2018, section 2.5)
    """
    ids, index = context.ids, context.position
    length = ids.shape[2]
    if length < size:
        return log_probs
    starts = jnp.arange(length - size + 1)
    repeats = jnp.broadcast_to(starts + size <= index, (*ids.shape[:2], starts.size))
    for offset in range(size - 1):
        last = jax.lax.dynamic_index_in_dim(ids, index - size + 1 + offset, 2)
        repeats = repeats & (ids[:, :, offset : offset + starts.size] == last)
    followers = ids[:, :, size - 1 :]
    return _at(log_probs, followers, repeats, -jnp.inf)


def repetition_penalty(log_probs: LogProbs, context: SearchContext, *, factor: float) -> LogProbs:
    """Multiplies the log probabilities of ids that the hypothesis holds by `factor`.

    A factor above 1 makes them less likely. (Keskar et al. 2019, section 4.1, on log probabilities)
    """
    held = jnp.arange(context.ids.shape[2]) < context.position
    held = jnp.broadcast_to(held, context.ids.shape)
    penalized = jnp.take_along_axis(log_probs, context.ids, axis=2) * factor
    return _at(log_probs, context.ids, held, penalized)


def temperature(log_probs: LogProbs, _: SearchContext, *, value: float) -> LogProbs:
    """Divides the log probabilities by `value`."""
    return log_probs / value


def top_k(log_probs: LogProbs, _: SearchContext, *, count: int) -> LogProbs:
    """Forbids all but the `count` likeliest ids (Fan et al. 2018)."""
    best, chosen = jax.lax.top_k(log_probs, min(count, log_probs.shape[-1]))
    return _only(log_probs, chosen, best)


def top_p(log_probs: LogProbs, _: SearchContext, *, mass: float) -> LogProbs:
    """Keeps the fewest likeliest ids whose probabilities add up to at least `mass` of all that are
    allowed, and forbids the others (Holtzman et al. 2020)."""
    best, chosen = jax.lax.top_k(log_probs, log_probs.shape[-1])
    probs = jax.nn.softmax(best)
    before = jnp.cumsum(probs, axis=-1) - probs
    return _only(log_probs, chosen, jnp.where(before < mass, best, -jnp.inf))


def forced_prefix(log_probs: LogProbs, context: SearchContext) -> LogProbs:
    """Forbids all but the id of `Sentences.prefix` at this position, if there is one.

    It must be the last processor: it allows what others have forbidden.
    """
    prefix = context.sentences.prefix
    assert prefix is not None
    if prefix.shape[1] == 0:
        return log_probs
    index = jnp.minimum(context.position, prefix.shape[1] - 1)
    forced = jax.lax.dynamic_index_in_dim(prefix, index, 1)[:, :, None]  # [B, 1, 1]
    is_forced = (forced != PAD) & (context.position < prefix.shape[1])
    vocabulary = jnp.arange(log_probs.shape[-1])[None, None, :]
    only = jnp.where(vocabulary == forced, context.log_probs, -jnp.inf)
    return jnp.where(is_forced, only, log_probs)


def _at(
    log_probs: LogProbs,
    ids: Int[Array, "B K I"],
    where: Array,
    values: Float[Array, "#B #K #I"] | float,
) -> LogProbs:
    """Returns `log_probs` with `values` at `ids` where `where` holds."""
    ids = jnp.where(where, ids, log_probs.shape[-1])  # out of bounds: dropped
    sentences = jnp.arange(ids.shape[0])[:, None, None]
    beams = jnp.arange(ids.shape[1])[:, None]
    return log_probs.at[sentences, beams, ids].set(values, mode="drop")


def _only(log_probs: LogProbs, ids: Int[Array, "B K I"], values: Float[Array, "B K I"]) -> LogProbs:
    """Returns `values` at `ids`, -inf elsewhere."""
    nothing = jnp.full_like(log_probs, -jnp.inf)
    return jnp.put_along_axis(nothing, ids, values, axis=-1, inplace=False)


LengthPenalty = Callable[[Float[Array, "*B"], Float[Array, "#*B"]], Float[Array, "*B"]]


def unnormalized(log_prob: Any, _: Any) -> Any:
    """Returns the log probability."""
    return log_prob


def gnmt(alpha: float) -> LengthPenalty:
    """Returns the penalty log p / ((5 + L) / 6)^alpha (Wu et al. 2016, eq. 14)."""
    return lambda log_prob, length: log_prob / ((5.0 + length) / 6.0) ** alpha


def power(alpha: float) -> LengthPenalty:
    """Returns the penalty log p / L^alpha; with alpha 1, scores are mean log probabilities."""
    return lambda log_prob, length: log_prob / length**alpha


def reward(each: float) -> LengthPenalty:
    """Returns the sum log p + `each` · L (He et al. 2016, "Improved NMT with SMT features")."""
    return lambda log_prob, length: log_prob + each * length
