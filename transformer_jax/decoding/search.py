"""Greedy and beam search over any function that computes the logits of the next id.

A `Step` maps (ids [B, K], state, index) to (logits [B, K, V], state, aux), where the ids are those
at position `index` of K hypotheses per sentence. The searches do not depend on models, so that
tests can search in a lookup table. `lengths` bounds the output of each sentence, so that a result
does not depend on which other sentences share its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.special_ids import PAD
from transformer_jax.types import DecodeState

Step = Callable[
    [Int[Array, "B K"], DecodeState, Int[Array, ""]],
    tuple[Float[Array, "B K V"], DecodeState, Any],
]

Penalty = Callable[[Float[Array, "*B"]], Float[Array, "*B"]]
"""Length of a hypothesis, end symbol included -> the divisor of its log probability."""

LogitsProcessor = Callable[
    [Float[Array, "B K V"], Int[Array, "B K T"], Int[Array, ""]], Float[Array, "B K V"]
]
"""(log probabilities of the next id, ids so far, their number) -> the log probabilities that the
search uses, -inf for an id that may not follow. Processors do not renormalize."""


class Hypotheses(NamedTuple):
    """Result of a search: the hypotheses of each sentence, best first."""

    ids: Int[Array, "B K T"]  # with the end symbol, `PAD` after it
    scores: Float[Array, "B K"]  # log probability over the length penalty; -inf: no hypothesis


def suppress(ids: Sequence[int]) -> LogitsProcessor:
    """Returns a processor that forbids `ids`."""

    def process(
        log_probs: Float[Array, "B K V"], _: Int[Array, "B K T"], __: Int[Array, ""]
    ) -> Float[Array, "B K V"]:
        vocabulary = jnp.arange(log_probs.shape[-1])
        return jnp.where(jnp.isin(vocabulary, jnp.asarray(ids)), -jnp.inf, log_probs)

    return process


NO_PADDING = suppress((PAD,))


def gnmt_penalty(alpha: float) -> Penalty:
    """Returns the penalty ((5 + L) / 6)^alpha (Wu et al. 2016, eq. 14)."""
    return lambda length: ((5.0 + length) / 6.0) ** alpha


def power_penalty(alpha: float) -> Penalty:
    """Returns the penalty L^alpha; with alpha 1, scores are mean log probabilities."""
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
    processors: Sequence[LogitsProcessor] = (NO_PADDING,),
) -> Hypotheses:
    """Returns one hypothesis per sentence, with the most likely id at each position.

    A hypothesis that reaches `lengths[b]` tokens without an end symbol is truncated there.
    """
    sentences = lengths.shape[0]

    def alive(carry: tuple) -> Bool[Array, ""]:
        index, _, _, done, _, _ = carry
        return (index < max_length) & ~jnp.all(done)

    def advance(carry: tuple) -> tuple:
        index, last, out, done, scores, state = carry
        logits, state, _ = step(last, state, index)
        log_probs = _log_probs(logits, out, index, processors)
        best = jnp.where(done, PAD, jnp.argmax(log_probs, axis=-1).astype(jnp.int32))
        gained = jnp.take_along_axis(log_probs, best[..., None], axis=-1)[..., 0]
        scores = scores + jnp.where(done, 0.0, gained)
        out = jax.lax.dynamic_update_index_in_dim(out, best, index, axis=2)
        done = done | (best == end_id) | (index + 1 >= lengths[:, None])
        return index + 1, best, out, done, scores, state

    first = (
        jnp.zeros((), jnp.int32),
        jnp.full((sentences, 1), start_id, jnp.int32),
        jnp.full((sentences, 1, max_length), PAD, jnp.int32),
        lengths[:, None] <= 0,
        jnp.zeros((sentences, 1), jnp.float32),
        state,
    )
    _, _, out, _, scores, _ = jax.lax.while_loop(alive, advance, first)
    length = jnp.sum(out != PAD, axis=2)
    scores = scores / penalty(jnp.maximum(length, 1).astype(jnp.float32))
    return Hypotheses(out, jnp.where(length > 0, scores, -jnp.inf))


class _Beam(NamedTuple):
    position: Int[Array, ""]
    alive_ids: Int[Array, "B K T"]
    alive_scores: Float[Array, "B K"]  # log probabilities, best first
    ended_ids: Int[Array, "B K T"]
    ended_scores: Float[Array, "B K"]  # penalized, best first
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
    processors: Sequence[LogitsProcessor] = (NO_PADDING,),
) -> Hypotheses:
    """Returns the `beams` best ended hypotheses, by log probability over `penalty(length)`.

    A sentence is done when none of its live hypotheses can still beat its worst ended one.
    Hypotheses that reach `lengths[b]` tokens without an end symbol count as ended there. With one
    beam and penalty 1 this is greedy search; with as many beams as there are sequences it is
    exhaustive search. (Wu et al. 2016)
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
        log_probs = _log_probs(logits, beam.alive_ids, index, processors)
        scores = beam.alive_scores[..., None] + log_probs
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
        # A sentence that is done does not change while others in the batch continue.
        frozen = beam.done
        return new._replace(
            ended_ids=jnp.where(frozen[:, None, None], beam.ended_ids, new.ended_ids),
            ended_scores=jnp.where(frozen[:, None], beam.ended_scores, new.ended_scores),
        )

    empty = jnp.full((sentences, beams, max_length), PAD, jnp.int32)
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
    """Returns the best divisor that a live hypothesis can reach: the largest, as scores are < 0."""
    now, last = penalty(length.astype(jnp.float32)), penalty(lengths.astype(jnp.float32))
    return jnp.maximum(now, last)


def _log_probs(
    logits: Float[Array, "B K V"],
    ids: Int[Array, "B K T"],
    index: Int[Array, ""],
    processors: Sequence[LogitsProcessor],
) -> Float[Array, "B K V"]:
    """Returns the log probabilities of the next id in float32, after the processors."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    for process in processors:
        log_probs = process(log_probs, ids, index)
    return log_probs


def _take(x: Array, beams: Int[Array, "B K"]) -> Array:
    """Returns the given rows of x [B, K', ...] for each sentence."""
    return jnp.take_along_axis(x, beams.reshape(*beams.shape, *[1] * (x.ndim - 2)), axis=1)
