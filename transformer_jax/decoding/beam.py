"""Beam search, and when it stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.decoding.length_rules import LengthRule
from transformer_jax.decoding.processors import Sentences
from transformer_jax.decoding.search import (
    Hypotheses,
    Live,
    Progress,
    Rules,
    Scored,
    Step,
    Strategy,
    grow_ids,
    last_ids,
    no_ids,
    reorder,
    score_next,
    take,
)
from transformer_jax.decoding.top_k import top_k
from transformer_jax.special_ids import PAD
from transformer_jax.types import Size


class Ended(NamedTuple):
    """Hypotheses that have ended, best first."""

    ids: Int[Array, "B K T"]
    ranks: Float[Array, "B K"]  # the length rule of the scores; -inf: no hypothesis
    log_probs: Float[Array, "B K"]  # the model's own

    def grown(self, length: int) -> Ended:
        """Returns the hypotheses, padded to `length` positions."""
        return self._replace(ids=grow_ids(self.ids, length))


Stop = Callable[[Float[Array, "B K"], Float[Array, " B"]], Bool[Array, " B"]]
"""(ranks of the ended hypotheses, best first, and a bound of those of the live ones) -> whether the
search of the sentence is over."""


def when_final(count: int) -> Stop:
    """Returns the `Stop` of a search whose `count` best hypotheses no other can displace.

    It never changes them. Log probabilities are at most 0, so the score s of a live hypothesis does
    not increase when it is extended. A length rule f(s, L) increases with s, so that the rank of
    what it becomes is at most the largest f(s, L) over the lengths L that it can reach. As f is
    monotonic in L, that is at the least or at the greatest L. It is largest for the live hypothesis
    of the largest s. Of equal ranks, the one that ended first is kept.
    """
    return lambda ranks, bound: ranks[:, count - 1] >= bound


def when_first(count: int) -> Stop:
    """Returns the `Stop` of a search that takes the first `count` hypotheses that end.

    With the beam size as the count it is that of most toolkits. (Kasai et al. 2022, algorithm 1)
    """
    return lambda ranks, _: ranks[:, count - 1] > -jnp.inf


def never(ranks: Float[Array, "B K"], _: Float[Array, " B"]) -> Bool[Array, " B"]:
    """Searches up to the greatest length."""
    return jnp.zeros(ranks.shape[0], bool)


class _Beam(NamedTuple):
    live: Live
    ended: Ended


def beam_search(beams: int, stop: Stop) -> Strategy:
    """Returns the search of the `beams` best ended hypotheses that a beam of this size finds.

    At each position the 2 K best extensions of K live hypotheses are candidates. Of the first K,
    those that end compete with those that ended before; the best K that do not end stay alive.
    Hypotheses that reach their greatest length count as ended there. Those that do not exist, as
    with more beams than sequences, have scores of -inf. (Wu et al. 2016, section 7)
    """

    def start(sentences: Sentences, rules: Rules) -> _Beam:
        return _Beam(*nothing_ended((sentences.max_length.shape[0], beams), rules))

    def advance(step: Step, progress: Progress, rules: Rules) -> Progress:
        index, done, sentences, (live, ended), state = progress
        logits, state, _ = step(last_ids(live, index, rules), state, index)
        scored = score_next(logits, live.ids, index, sentences, rules)
        candidates, parents = extend(live, scored, *best_extensions(live, scored))
        at_end = index + 1 >= sentences.max_length[:, None]
        ends = (candidates.ids[:, :, index] == rules.end_id) | at_end
        # Only the first K candidates may end: those beyond would not be in a beam of K.
        may_end = ends & (jnp.arange(ends.shape[1]) < beams)[None, :] & ~done[:, None]
        ranks = rules.length_rule(candidates.scores, (index + 1).astype(jnp.float32))
        ended = add_ended(ended, candidates, jnp.where(may_end, ranks, -jnp.inf))
        scores, kept = jax.lax.top_k(jnp.where(ends, -jnp.inf, candidates.scores), beams)
        live = Live(take(candidates.ids, kept), scores, take(candidates.log_probs, kept))
        origin = jnp.take_along_axis(parents, kept, axis=1)
        state = reorder(state, origin)
        best = bound(scores[:, 0], index + 2, sentences.max_length, rules.length_rule)
        done = done | at_end[:, 0] | stop(ended.ranks, best)
        return Progress(index + 1, done, sentences, _Beam(live, ended), state)

    return Strategy(beams, start, advance, hypotheses, grow)


def nothing_ended(shape: tuple[Size, int], rules: Rules) -> tuple[Live, Ended]:
    """Returns the beams [B, K] before the first position: one hypothesis each, and none ended."""
    live = no_ids(shape, rules)
    nothing = jnp.full(shape, -jnp.inf, jnp.float32)
    return live._replace(scores=nothing.at[:, 0].set(0.0)), Ended(live.ids, nothing, nothing)


def hypotheses(found: Any, rules: Rules) -> Hypotheses:
    """Returns the ended hypotheses with the length rule of the model's own log probabilities."""
    ids, ranks, log_probs = found.ended
    length = jnp.maximum(jnp.sum(ids != PAD, axis=2), 1).astype(jnp.float32)
    scores = jnp.where(ranks > -jnp.inf, rules.length_rule(log_probs, length), -jnp.inf)
    return Hypotheses(ids, scores, log_probs)


def best_extensions(live: Live, scored: Scored) -> tuple[Float[Array, "B C"], Int[Array, "B C"]]:
    """Returns the scores of the 2 K best extensions by an id, or of all, best first, and their
    indices of [K, V]."""
    sentences, beams, vocabulary = scored.log_probs.shape
    scores = (live.scores[..., None] + scored.log_probs).reshape(sentences, -1)
    return top_k(scores, min(2 * beams, beams * vocabulary))


def extend(
    live: Live, scored: Scored, scores: Float[Array, "B C"], indices: Int[Array, "B C"]
) -> tuple[Live, Int[Array, "B C"]]:
    """Returns the hypotheses of these scores and indices of [K, V], and which of K each extends."""
    parents, chosen = jnp.divmod(indices, scored.log_probs.shape[2])
    ids, index = take(live.ids, parents), scored.context.position
    ids = jax.lax.dynamic_update_index_in_dim(ids, chosen.astype(jnp.int32), index, axis=2)
    log_probs = take(live.log_probs, parents) + scored.own(parents, chosen)
    return Live(ids, scores, log_probs), parents


def grow(found: Any, length: int) -> Any:
    """Returns the live and the ended hypotheses, padded to `length` positions."""
    return found._replace(live=found.live.grown(length), ended=found.ended.grown(length))


def add_ended(ended: Ended, candidates: Live, ranks: Float[Array, "B C"]) -> Ended:
    """Returns the best of the ended hypotheses and of the candidates, which have these ranks."""
    new = Ended(candidates.ids, ranks, candidates.log_probs)
    pool = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), ended, new)
    ranks, best = jax.lax.top_k(pool.ranks, ended.ranks.shape[1])
    return Ended(take(pool.ids, best), ranks, take(pool.log_probs, best))


def bound(
    scores: Float[Array, " B"],
    least: Int[Array, ""],
    greatest: Int[Array, " B"],
    rule: LengthRule,
) -> Float[Array, " B"]:
    """Returns the largest rank of what a hypothesis of this score can become (see `when_final`)."""
    lengths = (least.astype(jnp.float32), greatest.astype(jnp.float32))
    return jnp.maximum(*(rule(scores, length) for length in lengths))
