"""Constraints of a beam search whose outputs hold given phrases (Post and Vilar 2018)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.decoding.beam import Constraints, best_extensions
from transformer_jax.decoding.processors import Sentences
from transformer_jax.decoding.search import Live, Scored
from transformer_jax.decoding.top_k import first_argmax
from transformer_jax.special_ids import PAD
from transformer_jax.types import take_beams


class Met(NamedTuple):
    """What hypotheses hold of the P phrases of their sentence."""

    complete: Bool[Array, "B C P"]
    current: Int[Array, "B C"]  # the phrase whose first ids are the last ones of the hypothesis
    matched: Int[Array, "B C"]  # the number of these ids; 0: none


def _start(sentences: Sentences, beams: int) -> Met:
    """Returns what hypotheses without ids hold."""
    count, most, _ = _phrases(sentences).shape
    nothing = jnp.zeros((count, beams), jnp.int32)
    return Met(jnp.zeros((count, beams, most), bool), nothing, nothing)


def _propose(live: Live, met: Met, scored: Scored) -> tuple[Float[Array, "B C"], Int[Array, "B C"]]:
    """Returns the scores of the candidates, best first, and their indices of [K, V].

    Besides the best extensions of all, they are the best one of each hypothesis, so that no bank
    runs empty, and for each hypothesis the next id of every phrase that it does not hold.
    """
    phrases = _phrases(scored.context.sentences)
    sentences, beams, vocabulary = scored.log_probs.shape
    _, best = best_extensions(live, met, scored)
    rows = jnp.arange(beams)[None, :] * vocabulary
    best_of_each = rows + first_argmax(scored.log_probs)
    following = jnp.where(met.complete, PAD, phrases[:, None, :, 0])
    under_way = (met.matched > 0)[..., None] & _is_phrase(met.current, phrases)
    following = jnp.where(under_way, _next_id(met, phrases)[..., None], following)
    of_phrases = (rows[..., None] + following).reshape(sentences, -1)  # of padding: never likely
    indices = jnp.concatenate([best, best_of_each, of_phrases], axis=1)
    # An extension that was proposed for two reasons is a candidate once.
    earlier = jnp.tri(indices.shape[1], k=-1, dtype=bool)[None]
    repeated = jnp.any((indices[:, :, None] == indices[:, None, :]) & earlier, axis=2)
    gained = jnp.take_along_axis(scored.log_probs.reshape(sentences, -1), indices, axis=1)
    scores = jnp.where(repeated, -jnp.inf, gained + take_beams(live.scores, indices // vocabulary))
    scores, order = jax.lax.top_k(scores, indices.shape[1])
    return scores, jnp.take_along_axis(indices, order, axis=1)


def _update(
    met: Met, ids: Int[Array, "B C"], sentences: Sentences
) -> tuple[Met, Int[Array, "B C"]]:
    """Returns what hypotheses hold once `ids` follow them, and how many ids they then lack.

    An id that does not continue the phrase that is under way may begin another one.
    """
    phrases = _phrases(sentences)
    goes_on = (met.matched > 0) & (ids == _next_id(met, phrases))
    first = phrases[:, None, :, 0]
    begins = ~met.complete & (first == ids[..., None]) & (first != PAD)
    current = jnp.where(goes_on, met.current, jnp.argmax(begins, axis=2).astype(jnp.int32))
    matched = jnp.where(goes_on, met.matched + 1, jnp.any(begins, axis=2).astype(jnp.int32))
    lengths = jnp.sum(phrases != PAD, axis=2)
    is_last = (matched > 0) & (matched == jnp.take_along_axis(lengths, current, axis=1))
    complete = met.complete | (is_last[..., None] & _is_phrase(current, phrases))
    met = Met(complete, current, jnp.where(is_last, 0, matched))
    return met, jnp.sum(lengths, axis=1)[:, None] - _held(met, phrases)


def _keep(
    scores: Float[Array, "B C"], met: Met, sentences: Sentences, beams: int
) -> Int[Array, "B K"]:
    """Returns the candidates that stay in the beam, of those whose scores are not -inf.

    Candidates that hold as many ids of phrases form a bank. The beam takes the best one of each
    bank, beginning with the fullest bank, then the second best of each, and so on. Otherwise those
    that hold fewer ids, which are likelier, would crowd out the others.
    """
    held, alive = _held(met, _phrases(sentences)), scores > -jnp.inf
    same_bank = (held[:, :, None] == held[:, None, :]) & alive[:, None, :]
    better = jnp.tri(held.shape[1], k=-1, dtype=bool)[None]  # candidates are sorted by score
    place = jnp.sum(same_bank & better, axis=2)  # within the bank
    order = place * (jnp.max(held, axis=1, keepdims=True) + 1) - held
    last = jnp.iinfo(jnp.int32).max
    _, kept = jax.lax.top_k(-jnp.where(alive, order, last), beams)
    return kept


PHRASES = Constraints(_start, _propose, _update, _keep)
"""Outputs hold all of `Sentences.phrases`. Sentences without phrases are searched as without
constraints."""


def _phrases(sentences: Sentences) -> Int[Array, "B P L"]:
    assert sentences.phrases is not None
    return jnp.asarray(sentences.phrases)


def _is_phrase(chosen: Int[Array, "B C"], phrases: Int[Array, "B P L"]) -> Bool[Array, "B C P"]:
    """Returns True for the phrase that is chosen."""
    return jnp.arange(phrases.shape[1])[None, None] == chosen[..., None]


def _next_id(met: Met, phrases: Int[Array, "B P L"]) -> Int[Array, "B C"]:
    """Returns the next id of the phrase that is under way; `PAD` after its last one."""
    padded = jnp.pad(phrases, ((0, 0), (0, 0), (0, 1)), constant_values=PAD)
    sentences = jnp.arange(phrases.shape[0])[:, None]
    return padded[sentences, met.current, met.matched]


def _held(met: Met, phrases: Int[Array, "B P L"]) -> Int[Array, "B C"]:
    """Returns the number of ids of phrases that hypotheses hold."""
    lengths = jnp.sum(phrases != PAD, axis=2)[:, None]
    return jnp.sum(jnp.where(met.complete, lengths, 0), axis=2) + met.matched
