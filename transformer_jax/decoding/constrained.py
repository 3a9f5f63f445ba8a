"""Beam search for outputs that hold given phrases (Post and Vilar 2018)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.decoding.beam import (
    Ended,
    Stop,
    add_ended,
    best_extensions,
    bound,
    extend,
    grow,
    hypotheses,
    nothing_ended,
)
from transformer_jax.decoding.processors import Sentences
from transformer_jax.decoding.search import (
    Live,
    Progress,
    Rules,
    Scored,
    Step,
    Strategy,
    last_ids,
    reorder,
    score_next,
    take,
)
from transformer_jax.decoding.top_k import first_argmax
from transformer_jax.special_ids import PAD

MISSING = 1e6
"""What the rank of a truncated hypothesis loses for each id of a phrase that it does not hold."""


class Met(NamedTuple):
    """What hypotheses hold of the P phrases of their sentence."""

    whole: Bool[Array, "B C P"]
    phrase: Int[Array, "B C"]  # the phrase whose first ids are the last ones
    begun: Int[Array, "B C"]  # the number of these ids; 0: none


class _Beam(NamedTuple):
    live: Live
    met: Met
    ended: Ended


def constrained_beam_search(beams: int, stop: Stop) -> Strategy:
    """Returns the beam search of outputs that hold all of `Sentences.phrases`.

    Candidates are the 2 K best extensions, the best one of each hypothesis, and those by the next
    id of each phrase that it lacks. They form banks by the number of ids of phrases that they hold.
    The beam takes the best of each bank, beginning with the fullest one, then the second best, and
    so on. Hypotheses end once they hold all phrases. One that is truncated may lack some; any that
    lacks fewer is preferred to it. Sentences without phrases are searched as by `beam_search`.
    """

    def start(sentences: Sentences, rules: Rules) -> _Beam:
        assert sentences.phrases is not None
        count, phrases, _ = sentences.phrases.shape
        live, ended = nothing_ended((count, beams), rules)
        nothing = jnp.zeros((count, beams), jnp.int32)
        return _Beam(live, Met(jnp.zeros((count, beams, phrases), bool), nothing, nothing), ended)

    def advance(step: Step, progress: Progress, rules: Rules) -> Progress:
        index, done, sentences, (live, met, ended), state = progress
        phrases = jnp.asarray(sentences.phrases)
        logits, state, _ = step(last_ids(live, index, rules), state, index)
        scored = score_next(logits, live.ids, index, sentences, rules)
        candidates, parents = extend(live, scored, *_candidates(live, met, scored, phrases))
        chosen = candidates.ids[:, :, index]
        met = _advance(jax.tree.map(lambda x: take(x, parents), met), chosen, phrases)
        held, lacking = _count(met, phrases)
        at_end = index + 1 >= sentences.max_length[:, None]
        is_end = chosen == rules.end_id
        candidates = candidates._replace(
            scores=jnp.where(is_end & (lacking > 0) & ~at_end, -jnp.inf, candidates.scores)
        )
        # As in a beam without phrases, only the first K candidates that lack nothing may end.
        first = (lacking == 0) & (jnp.cumsum(lacking == 0, axis=1) <= beams)
        may_end = (is_end & first | at_end) & ~done[:, None]
        ranks = rules.length_rule(candidates.scores, (index + 1).astype(jnp.float32))
        ranks = jnp.where(may_end, ranks - MISSING * lacking.astype(jnp.float32), -jnp.inf)
        ended = add_ended(ended, candidates, ranks)
        alive = ~is_end & ~at_end & (candidates.scores > -jnp.inf)
        kept = _from_banks(held, alive, beams)
        scores = jnp.where(take(alive, kept), take(candidates.scores, kept), -jnp.inf)
        live = Live(take(candidates.ids, kept), scores, take(candidates.log_probs, kept))
        origin = jnp.take_along_axis(parents, kept, axis=1)
        state = reorder(state, origin)
        met = jax.tree.map(lambda x: take(x, kept), met)
        best = bound(jnp.max(scores, axis=1), index + 2, sentences.max_length, rules.length_rule)
        done = done | at_end[:, 0] | stop(ended.ranks, best)
        return Progress(index + 1, done, sentences, _Beam(live, met, ended), state)

    return Strategy(beams, start, advance, hypotheses, grow)


def _candidates(
    live: Live, met: Met, scored: Scored, phrases: Int[Array, "B P L"]
) -> tuple[Float[Array, "B C"], Int[Array, "B C"]]:
    """Returns the scores of the candidates, best first, and their indices of [K, V]."""
    sentences, beams, vocabulary = scored.log_probs.shape
    _, best = best_extensions(live, scored)
    rows = jnp.arange(beams)[None, :] * vocabulary
    best_of_each = rows + first_argmax(scored.log_probs)
    following = jnp.where(met.whole, PAD, phrases[:, None, :, 0])
    under_way = (met.begun > 0)[..., None] & _is_phrase(met.phrase, phrases)
    following = jnp.where(under_way, _next_id(met, phrases)[..., None], following)
    of_phrases = (rows[..., None] + following).reshape(sentences, -1)  # of padding: never likely
    flat = jnp.concatenate([best, best_of_each, of_phrases], axis=1)
    earlier = jnp.tri(flat.shape[1], k=-1, dtype=bool)[None]
    repeated = jnp.any((flat[:, :, None] == flat[:, None, :]) & earlier, axis=2)
    own = jnp.take_along_axis(scored.log_probs.reshape(sentences, -1), flat, axis=1)
    scores = jnp.where(repeated, -jnp.inf, own + take(live.scores, flat // vocabulary))
    scores, order = jax.lax.top_k(scores, flat.shape[1])
    return scores, jnp.take_along_axis(flat, order, axis=1)


def _is_phrase(chosen: Int[Array, "B C"], phrases: Int[Array, "B P L"]) -> Bool[Array, "B C P"]:
    """Returns True for the phrase that is chosen."""
    return jnp.arange(phrases.shape[1])[None, None] == chosen[..., None]


def _next_id(met: Met, phrases: Int[Array, "B P L"]) -> Int[Array, "B C"]:
    """Returns the next id of the phrase that is under way; `PAD` after its last one."""
    padded = jnp.pad(phrases, ((0, 0), (0, 0), (0, 1)), constant_values=PAD)
    sentences = jnp.arange(phrases.shape[0])[:, None]
    return padded[sentences, met.phrase, met.begun]


def _advance(met: Met, ids: Int[Array, "B C"], phrases: Int[Array, "B P L"]) -> Met:
    """Returns what hypotheses hold once `ids` follow them.

    An id that does not continue the phrase that is under way may begin another one.
    """
    goes_on = (met.begun > 0) & (ids == _next_id(met, phrases))
    first = phrases[:, None, :, 0]
    begins = ~met.whole & (first == ids[..., None]) & (first != PAD)
    phrase = jnp.where(goes_on, met.phrase, jnp.argmax(begins, axis=2).astype(jnp.int32))
    count = jnp.where(goes_on, met.begun + 1, jnp.any(begins, axis=2).astype(jnp.int32))
    lengths = jnp.take_along_axis(jnp.sum(phrases != PAD, axis=2), phrase, axis=1)
    complete = (count > 0) & (count == lengths)
    whole = met.whole | (complete[..., None] & _is_phrase(phrase, phrases))
    return Met(whole, phrase, jnp.where(complete, 0, count))


def _count(met: Met, phrases: Int[Array, "B P L"]) -> tuple[Int[Array, "B C"], Int[Array, "B C"]]:
    """Returns the numbers of ids of phrases that hypotheses hold and that they lack."""
    lengths = jnp.sum(phrases != PAD, axis=2)[:, None]
    held = jnp.sum(jnp.where(met.whole, lengths, 0), axis=2) + met.begun
    return held, jnp.sum(lengths, axis=2) - held


def _from_banks(
    held: Int[Array, "B C"], alive: Bool[Array, "B C"], beams: int
) -> Int[Array, "B K"]:
    """Returns the candidates, sorted by score, that stay: the best of each bank, and so on."""
    count = held.shape[1]
    same = (held[:, :, None] == held[:, None, :]) & alive[:, None, :]
    place = jnp.sum(same & jnp.tri(count, k=-1, dtype=bool)[None], axis=2)  # within the bank
    order = place * (jnp.max(held, axis=1, keepdims=True) + 1) - held
    last = jnp.iinfo(jnp.int32).max
    _, kept = jax.lax.top_k(-jnp.where(alive, order, last), beams)
    return kept
