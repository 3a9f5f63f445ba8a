"""Beam search, when it stops, and constraints such as phrases that outputs hold."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.decoding import search
from transformer_jax.decoding.processors import LengthPenalty, Sentences
from transformer_jax.decoding.search import Hypotheses, Progress, Rules, Scored, Step, Strategy
from transformer_jax.decoding.top_k import first_argmax, top_k
from transformer_jax.special_ids import PAD
from transformer_jax.types import take_beams

Scores = Float[Array, "B C"]
Numbers = Int[Array, "B C"]
"""Scores, and ids, indices or counts, of C candidates or hypotheses of each sentence."""

INCOMPLETE = 1e6
"""What the rank of a truncated hypothesis loses for each id that its constraints still need."""


class Beam(NamedTuple):
    """The hypotheses of a beam search."""

    live: Hypotheses
    ended: Hypotheses  # the scores are ranks: those of `live` with the length penalty
    met: Any  # what the constraints know of each live hypothesis; leaves [B, K, ...]


Stop = Callable[[Float[Array, "B K"], Float[Array, " B"]], Bool[Array, " B"]]
"""(ranks of the ended hypotheses, best first, and a bound of those of the live ones) -> whether the
search of the sentence is over."""


def optimal_stopping(count: int) -> Stop:
    """Returns the `Stop` of a search whose `count` best hypotheses no other can displace.

    It never changes them. Log probabilities are at most 0, so the score s of a live hypothesis does
    not increase when it is extended. A length penalty f(s, L) increases with s, so that the rank of
    what it becomes is at most the largest f(s, L) over the lengths L that it can reach. As f is
    monotonic in L, that is at the least or at the greatest L. It is largest for the live hypothesis
    of the largest s. Of equal ranks, the one that ended first is kept. (Huang et al. 2017)
    """
    return lambda ranks, bound: ranks[:, count - 1] >= bound


def early_stopping(count: int) -> Stop:
    """Returns the `Stop` of a search that takes the first `count` hypotheses that end.

    With the beam size as the count it is that of most toolkits. (Kasai et al. 2022, algorithm 1)
    """
    return lambda ranks, _: ranks[:, count - 1] > -jnp.inf


class Constraints(NamedTuple):
    """Hooks of a beam search whose outputs must hold something. `met` is as in `Beam`."""

    start: Callable[[Sentences, int], Any]
    """(sentences, beams) -> `met` before the first position."""
    propose: Callable[[Hypotheses, Any, Scored], tuple[Scores, Numbers]]
    """(live, met, scored) -> the scores of C candidates, best first, and their indices of [K, V].
    """
    update: Callable[[Any, Numbers, Sentences], tuple[Any, Numbers]]
    """(`met` of the hypotheses that candidates extend, the ids by which they do, sentences) ->
    `met` of the candidates, and the number of ids that each still needs."""
    keep: Callable[[Scores, Any, Sentences, int], Int[Array, "B K"]]
    """(scores of the candidates, -inf for those that may not stay, met, sentences, beams) -> the
    candidates that stay in the beam."""


def best_extensions(live: Hypotheses, met: Any, scored: Scored) -> tuple[Scores, Numbers]:
    """Returns the scores of the 2 K best extensions by an id, or of all, best first, and their
    indices of [K, V]."""
    sentences, beams, vocabulary = scored.log_probs.shape
    scores = (live.scores[..., None] + scored.log_probs).reshape(sentences, -1)
    return top_k(scores, min(2 * beams, beams * vocabulary))


UNCONSTRAINED = Constraints(
    start=lambda sentences, beams: (),
    propose=best_extensions,
    update=lambda met, ids, sentences: (met, jnp.zeros_like(ids)),
    keep=lambda scores, met, sentences, beams: jax.lax.top_k(scores, beams)[1],
)


def beam_search(
    beams: int, stop: Stop, constraints: Constraints = UNCONSTRAINED, *, lookahead: bool = True
) -> Strategy:
    """Returns the search of the `beams` best ended hypotheses that a beam of this size finds.

    At each position the 2 K best extensions of K live hypotheses are candidates. Of the first K,
    those that end compete with those that ended before; the best K that do not end stay alive.
    Hypotheses that reach their greatest length count as ended there. Those that do not exist, as
    with more beams than sequences, have scores of -inf. (Wu et al. 2016, section 7)

    Constraints may add candidates and choose those that stay. A hypothesis then ends once it meets
    them. One that is truncated may need more; any that needs less is preferred to it.

    lookahead: whether `stop` is given a bound of what live hypotheses become; otherwise the rank
    that the best one would have if it ended as it is.
    """

    def start(sentences: Sentences, rules: Rules) -> Beam:
        shape = (sentences.max_length.shape[0], beams)
        live, nothing = search.no_ids(shape, rules), jnp.full(shape, -jnp.inf, jnp.float32)
        live = live._replace(scores=nothing.at[:, 0].set(0.0))  # one hypothesis each, to begin with
        ended = Hypotheses(live.ids, nothing, nothing)
        return Beam(live, ended, constraints.start(sentences, beams))

    def extend_beam(step: Step, rules: Rules, progress: Progress) -> Progress:
        index, done, sentences, (live, ended, met), state = progress
        logits, state, _ = step(search.last_ids(live, index, rules), state, index)
        scored = search.score_next(logits, live.ids, index, sentences, rules)
        candidates, parents = _extend(live, scored, *constraints.propose(live, met, scored))
        chosen = candidates.ids[:, :, index]
        met, needed = constraints.update(take_beams(met, parents), chosen, sentences)
        is_end, at_limit = chosen == rules.end_id, index + 1 >= sentences.max_length[:, None]

        # Only the first K candidates that need nothing may end: others would not be in a beam of K.
        # At the limit all end, and those beyond the first K are worse than these.
        first = (needed == 0) & (jnp.cumsum(needed == 0, axis=1) <= beams)
        may_end = (is_end & first | at_limit) & ~done[:, None]
        ranks = rules.length_penalty(candidates.scores, (index + 1).astype(jnp.float32))
        ranks = ranks - INCOMPLETE * needed.astype(jnp.float32)
        new = candidates._replace(scores=jnp.where(may_end, ranks, -jnp.inf))
        pool = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), ended, new)
        ended = take_beams(pool, jax.lax.top_k(pool.scores, beams)[1])

        scores = jnp.where(is_end | at_limit, -jnp.inf, candidates.scores)
        kept = constraints.keep(scores, met, sentences, beams)
        live = take_beams(candidates._replace(scores=scores), kept)
        state = search.reorder(state, take_beams(parents, kept))
        best = jnp.max(live.scores, axis=1)
        bound = _bound(best, index + 2, sentences, rules.length_penalty)
        if not lookahead:
            bound = rules.length_penalty(best, (index + 1).astype(jnp.float32))
        done = done | at_limit[:, 0] | stop(ended.scores, bound)
        return Progress(index + 1, done, sentences, Beam(live, ended, take_beams(met, kept)), state)

    return Strategy(
        beams, start, extend_beam, lambda beam, rules: search.finished(beam.ended, rules)
    )


def _extend(
    live: Hypotheses, scored: Scored, scores: Scores, indices: Numbers
) -> tuple[Hypotheses, Numbers]:
    """Returns the hypotheses of these scores and indices of [K, V], and which of K each extends."""
    parents, chosen = jnp.divmod(indices, scored.log_probs.shape[2])
    ids, index = take_beams(live.ids, parents), scored.context.position
    ids = jax.lax.dynamic_update_index_in_dim(ids, chosen.astype(jnp.int32), index, axis=2)
    log_probs = take_beams(live.log_probs, parents) + scored.by_model(parents, chosen)
    return Hypotheses(ids, scores, log_probs), parents


def _bound(
    scores: Float[Array, " B"], least: Int[Array, ""], sentences: Sentences, penalty: LengthPenalty
) -> Float[Array, " B"]:
    """Returns the largest rank of what a hypothesis of this score can become, whose length is at
    least `least` (see `optimal_stopping`)."""
    lengths = (least.astype(jnp.float32), sentences.max_length.astype(jnp.float32))
    return jnp.maximum(*(penalty(scores, length) for length in lengths))


# The constraint that outputs hold given phrases (Post and Vilar 2018)


class Met(NamedTuple):
    """What hypotheses hold of the P phrases of their sentence.

    `begun` follows every beginning of every phrase at once, also those that overlap (Baeza-Yates
    and Gonnet 1992, "A new approach to text searching").
    """

    complete: Bool[Array, "B C P"]
    begun: Bool[Array, "B C P L"]  # whether the last l + 1 ids are the first ones of the phrase

    def matched(self) -> Int[Array, "B C P"]:
        """Returns the number of ids of the longest beginning of each phrase that ends here."""
        lengths = jnp.arange(1, self.begun.shape[3] + 1)[None, None, None]
        return jnp.max(jnp.where(self.begun, lengths, 0), axis=3)


def _start(sentences: Sentences, beams: int) -> Met:
    """Returns what hypotheses without ids hold."""
    phrases = _phrases(sentences)
    count, most, longest = phrases.shape
    complete = jnp.broadcast_to(phrases[:, None, :, 0] == PAD, (count, beams, most))
    return Met(complete, jnp.zeros((count, beams, most, longest), bool))


def _propose(live: Hypotheses, met: Met, scored: Scored) -> tuple[Scores, Numbers]:
    """Returns the scores of the candidates, best first, and their indices of [K, V].

    Besides the best extensions of all, they are the best one of each hypothesis, so that no bank
    runs empty, and for each hypothesis the next id of every phrase that it does not hold.
    """
    phrases = _phrases(scored.context.sentences)
    sentences, beams, vocabulary = scored.log_probs.shape
    _, best = best_extensions(live, met, scored)
    rows = jnp.arange(beams)[None, :] * vocabulary
    best_of_each = rows + first_argmax(scored.log_probs)
    places = jnp.minimum(met.matched(), phrases.shape[2] - 1)[..., None]
    following = jnp.take_along_axis(phrases[:, None], places, axis=3)[..., 0]
    following = jnp.where(met.complete, PAD, following)  # padding is never likely
    of_phrases = (rows[..., None] + following).reshape(sentences, -1)
    indices = jnp.concatenate([best, best_of_each, of_phrases], axis=1)
    # An extension that was proposed for two reasons is a candidate once.
    earlier = jnp.tri(indices.shape[1], k=-1, dtype=bool)[None]
    repeated = jnp.any((indices[:, :, None] == indices[:, None, :]) & earlier, axis=2)
    gained = jnp.take_along_axis(scored.log_probs.reshape(sentences, -1), indices, axis=1)
    scores = jnp.where(repeated, -jnp.inf, gained + take_beams(live.scores, indices // vocabulary))
    scores, order = jax.lax.top_k(scores, indices.shape[1])
    return scores, jnp.take_along_axis(indices, order, axis=1)


def _update(met: Met, ids: Numbers, sentences: Sentences) -> tuple[Met, Numbers]:
    """Returns what hypotheses hold once `ids` follow them, and how many ids they then lack."""
    phrases = _phrases(sentences)[:, None]
    none = jnp.ones_like(met.begun[..., :1])  # no id is the beginning of every phrase
    before = jnp.concatenate([none, met.begun[..., :-1]], axis=3)
    begun = before & (phrases == ids[..., None, None]) & (phrases != PAD)
    lengths = _lengths(sentences)
    is_last = jnp.arange(1, phrases.shape[3] + 1)[None, None, None] == lengths[..., None]
    met = Met(met.complete | jnp.any(begun & is_last, axis=3), begun)
    return met, jnp.sum(lengths, axis=2) - _held(met, sentences)


def _keep(scores: Scores, met: Met, sentences: Sentences, beams: int) -> Int[Array, "B K"]:
    """Returns the candidates that stay in the beam, of those whose scores are not -inf.

    Candidates that hold as many ids of phrases form a bank. The beam takes the best one of each
    bank, and then the best of all others, so that a likely output that holds the phrases stays.
    Otherwise those that hold fewer ids, which are likelier, would crowd out the others. In a beam
    of one more than the ids of the phrases every bank has a place. As a candidate of each bank but
    the fullest can be extended into a fuller one, such a beam holds all phrases in the end.
    """
    held, alive = _held(met, sentences), scores > -jnp.inf
    same_bank = (held[:, :, None] == held[:, None, :]) & alive[:, None, :]
    better = jnp.tri(held.shape[1], k=-1, dtype=bool)[None]  # candidates are sorted by score
    is_first = ~jnp.any(same_bank & better, axis=2)
    order = jnp.where(alive, jnp.where(is_first, 2, 1), 0)
    _, kept = jax.lax.top_k(order, beams)  # of equal ones, the first
    return kept


PHRASES = Constraints(_start, _propose, _update, _keep)
"""Outputs hold all of `Sentences.phrases`, which may overlap. Sentences without phrases are
searched as without constraints."""


def _phrases(sentences: Sentences) -> Int[Array, "B P L"]:
    assert sentences.phrases is not None
    return jnp.asarray(sentences.phrases)


def _lengths(sentences: Sentences) -> Int[Array, "B 1 P"]:
    return jnp.sum(_phrases(sentences) != PAD, axis=2)[:, None]


def _held(met: Met, sentences: Sentences) -> Numbers:
    """Returns the number of ids of phrases that hypotheses hold: those of complete phrases and the
    longest beginning of another one. A next id of that one increases it."""
    complete = jnp.sum(jnp.where(met.complete, _lengths(sentences), 0), axis=2)
    return complete + jnp.max(jnp.where(met.complete, 0, met.matched()), axis=2)
