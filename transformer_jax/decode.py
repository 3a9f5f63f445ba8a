"""Search for the best target, over any function that scores the next id: greedy and beam.

A `Step` maps (ids [B, K], state, index) to (logits [B, K, V], state, aux): the ids at position
`index` of K hypotheses a sentence, and the scores of what follows. The searches know nothing of
models, so that they are tested with a lookup table. `lengths` bounds each sentence's output on its
own, so that a result does not depend on which other sentences share its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.types import DecodeState

Step = Callable[
    [Int[Array, "B K"], DecodeState, Int[Array, ""]],
    tuple[Float[Array, "B K V"], DecodeState, Any],
]

Penalty = Callable[[Float[Array, "*B"]], Float[Array, "*B"]]
"""Divisor of a hypothesis' log probability, by its length with the end symbol."""


class Hypotheses(NamedTuple):
    """What a search returns, best first."""

    ids: Int[Array, "B K T"]  # with the end symbol, 0 after it
    scores: Float[Array, "B K"]  # log probability over the length penalty; -inf: no hypothesis


def gnmt_penalty(alpha: float) -> Penalty:
    """((5 + L) / 6)^alpha (Wu et al. 2016, eq. 14)."""
    return lambda length: ((5.0 + length) / 6.0) ** alpha


def power_penalty(alpha: float) -> Penalty:
    """L^alpha; alpha 1 is the mean log probability."""
    return lambda length: length**alpha


def greedy(
    step: Step,
    state: DecodeState,
    *,
    lengths: Int[Array, " B"],
    max_length: int,
    start_id: int,
    end_id: int,
    penalty: Penalty,
) -> Hypotheses:
    """The likeliest id at each position, until every sentence has ended: one hypothesis each.

    A sentence of `lengths[b]` tokens without an end symbol is cut there.
    """
    sentences = lengths.shape[0]

    def alive(carry: tuple) -> Bool[Array, ""]:
        index, _, _, done, _, _ = carry
        return (index < max_length) & ~jnp.all(done)

    def advance(carry: tuple) -> tuple:
        index, last, out, done, scores, state = carry
        logits, state, _ = step(last, state, index)
        log_probs = _log_softmax(logits)
        best = jnp.where(done, 0, jnp.argmax(log_probs, axis=-1).astype(jnp.int32))
        gained = jnp.take_along_axis(log_probs, best[..., None], axis=-1)[..., 0]
        scores = scores + jnp.where(done, 0.0, gained)
        out = jax.lax.dynamic_update_index_in_dim(out, best, index, axis=2)
        done = done | (best == end_id) | (index + 1 >= lengths[:, None])
        return index + 1, best, out, done, scores, state

    first = (
        jnp.zeros((), jnp.int32),
        jnp.full((sentences, 1), start_id, jnp.int32),
        jnp.zeros((sentences, 1, max_length), jnp.int32),
        lengths[:, None] <= 0,
        jnp.zeros((sentences, 1), jnp.float32),
        state,
    )
    _, _, out, _, scores, _ = jax.lax.while_loop(alive, advance, first)
    length = jnp.sum(out != 0, axis=2)
    scores = scores / penalty(jnp.maximum(length, 1).astype(jnp.float32))
    return Hypotheses(out, jnp.where(length > 0, scores, -jnp.inf))


class _Beam(NamedTuple):
    position: Int[Array, ""]
    alive_ids: Int[Array, "B K T"]
    alive_scores: Float[Array, "B K"]  # log probabilities, best first
    ended_ids: Int[Array, "B K T"]
    ended_scores: Float[Array, "B K"]  # penalised, best first
    done: Bool[Array, " B"]
    state: DecodeState


def beam_search(
    step: Step,
    state: DecodeState,
    *,
    beams: int,
    lengths: Int[Array, " B"],
    max_length: int,
    start_id: int,
    end_id: int,
    penalty: Penalty,
) -> Hypotheses:
    """The `beams` best ended hypotheses, by log probability over `penalty(length)`.

    A sentence is done when no hypothesis alive can still beat its worst ended one. Hypotheses that
    reach `lengths[b]` without the end symbol count as ended there. One beam with penalty 1 is
    greedy search; as many beams as there are sequences is exhaustive search. (Wu et al. 2016)
    """
    sentences = lengths.shape[0]
    lengths = jnp.minimum(lengths, max_length)

    def alive(beam: _Beam) -> Bool[Array, ""]:
        return (beam.position < max_length) & ~jnp.all(beam.done)

    def advance(beam: _Beam) -> _Beam:
        index = beam.position
        last = jnp.where(
            index == 0, start_id, beam.alive_ids[:, :, jnp.maximum(index - 1, 0)]
        ).astype(jnp.int32)
        logits, state, _ = step(last, beam.state, index)
        scores = beam.alive_scores[..., None] + _log_softmax(logits)
        # 2K candidates: even if K of them end, K stay alive.
        vocabulary = scores.shape[-1]
        count = min(2 * beams, beams * vocabulary)
        scores, flat = jax.lax.top_k(scores.reshape(sentences, -1), count)
        parents, chosen = flat // vocabulary, (flat % vocabulary).astype(jnp.int32)
        ids = _take(beam.alive_ids, parents)
        ids = jax.lax.dynamic_update_index_in_dim(ids, chosen, index, axis=2)
        length = (index + 1).astype(jnp.float32)
        at_end = index + 1 >= lengths[:, None]
        ends = (chosen == end_id) | at_end

        # Only the first K candidates may end: those beyond would not be in a beam of K.
        may_end = ends & (at_end | (jnp.arange(count)[None, :] < beams))
        ended = jnp.where(may_end, scores / penalty(length), -jnp.inf)
        pool_scores = jnp.concatenate([beam.ended_scores, ended], axis=1)
        pool_ids = jnp.concatenate([beam.ended_ids, ids], axis=1)
        ended_scores, best = jax.lax.top_k(pool_scores, beams)
        ended_ids = _take(pool_ids, best)

        alive_scores, kept = jax.lax.top_k(jnp.where(ends, -jnp.inf, scores), beams)
        reordered = jax.tree.map(
            lambda x: _take(x, jnp.take_along_axis(parents, kept, axis=1)), state.beams
        )
        reachable = alive_scores[:, 0] / _best_penalty(penalty, index + 1, lengths)
        done = beam.done | at_end[:, 0] | (ended_scores[:, -1] >= reachable)
        new = _Beam(
            index + 1,
            _take(ids, kept),
            alive_scores,
            ended_ids,
            ended_scores,
            done,
            DecodeState(state.memory, reordered),
        )
        # A sentence that is done stays as it is, whatever the others in the batch still need.
        frozen = beam.done
        return new._replace(
            ended_ids=jnp.where(frozen[:, None, None], beam.ended_ids, new.ended_ids),
            ended_scores=jnp.where(frozen[:, None], beam.ended_scores, new.ended_scores),
        )

    empty = jnp.zeros((sentences, beams, max_length), jnp.int32)
    nothing = jnp.full((sentences, beams), -jnp.inf, jnp.float32)
    first = _Beam(
        jnp.zeros((), jnp.int32),
        empty,
        nothing.at[:, 0].set(0.0),
        empty,
        nothing,
        lengths <= 0,
        state,
    )
    last = jax.lax.while_loop(alive, advance, first)
    return Hypotheses(last.ended_ids, last.ended_scores)


def _best_penalty(
    penalty: Penalty, length: Int[Array, ""], lengths: Int[Array, " B"]
) -> Float[Array, " B"]:
    """The divisor most favourable to hypotheses that grow: scores are negative and it grows too."""
    now, last = penalty(length.astype(jnp.float32)), penalty(lengths.astype(jnp.float32))
    return jnp.maximum(now, last)


def _log_softmax(logits: Float[Array, "B K V"]) -> Float[Array, "B K V"]:
    """Log probabilities in float32 in which padding (id 0) never follows."""
    logits = logits.astype(jnp.float32)
    padding = jnp.arange(logits.shape[-1]) == 0
    return jnp.where(padding, -jnp.inf, jax.nn.log_softmax(logits))


def _take(x: Array, beams: Int[Array, "B K"]) -> Array:
    """Rows of x [B, K', ...] by hypothesis."""
    return jnp.take_along_axis(x, beams.reshape(*beams.shape, *[1] * (x.ndim - 2)), axis=1)
