"""Searches over any function that computes logits of the next id, whatever their strategy; and
greedy search and sampling.

A `Step` maps (ids [B, K], state, index) to (logits [B, K, V], state, aux), where the ids are those
at position `index` of K hypotheses per sentence. A `Strategy` says how a search starts and how it
extends hypotheses by one id, and `search` runs it to its end. None depends on models, so that tests
can search in a lookup table. `Sentences` holds what differs between sentences, so that a result
does not depend on which other sentences share its batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.decoding.processors import (
    NO_PADDING,
    LengthPenalty,
    LogProbs,
    Processor,
    SearchContext,
    Sentences,
    unnormalized,
)
from transformer_jax.decoding.top_k import first_argmax
from transformer_jax.special_ids import PAD
from transformer_jax.types import DecodeState, LayerState, Size, map_nodes, take_beams

Index = Int[Array, ""]
Step = Callable[[Int[Array, "B K"], Any, Index], tuple[Float[Array, "B K V"], Any, Any]]


class Hypotheses(NamedTuple):
    """Hypotheses of each sentence, best first.

    The scores of a result are `log_probs` with the length penalty, and those of hypotheses that a
    search extends (`live`) are sums of log probabilities after the processors.
    """

    ids: Int[Array, "B K T"]  # with the end symbol, `PAD` after it
    scores: Float[Array, "B K"]  # -inf: no hypothesis
    log_probs: Float[Array, "B K"]  # the model's own, in nats


@dataclass(frozen=True)
class Rules:
    """What all searches have in common.

    max_length: size of the array of ids. Outputs that reach the `max_length` of their sentence are
    truncated there without an end symbol.
    """

    max_length: Size
    start_id: int
    end_id: int
    length_penalty: LengthPenalty = unnormalized
    processors: Sequence[Processor] = (NO_PADDING,)


class Progress(NamedTuple):
    """How far a search is. All arrays but `position` have a row for each sentence."""

    position: Index  # number of ids so far
    done: Bool[Array, " B"]
    sentences: Sentences
    beam: Any  # the hypotheses, as the strategy keeps them
    state: Any


STRIDE = 8
"""Number of positions between those at which a search may be left."""


class Strategy(NamedTuple):
    """How to search: functions of which `search` calls `extend` until all sentences are done."""

    beams: int
    start: Callable[[Sentences, Rules], Any]
    """(sentences, rules) -> `Progress.beam` before the first position."""
    extend: Callable[[Step, Rules, Progress], Progress]
    """Extends the hypotheses of each sentence that is not done by an id."""
    hypotheses: Callable[[Any, Rules], Hypotheses]
    """(`Progress.beam`, rules) -> the hypotheses."""


def search(
    strategy: Strategy, step: Step, state: Any, sentences: Sentences, rules: Rules
) -> Hypotheses:
    """Returns the hypotheses of each sentence; none is longer than `Rules.max_length`."""
    lengths = jnp.minimum(sentences.max_length, rules.max_length)
    sentences = sentences._replace(max_length=lengths)
    progress = extend_until(strategy, step, begin(strategy, state, sentences, rules), rules)
    return strategy.hypotheses(progress.beam, rules)


def begin(strategy: Strategy, state: Any, sentences: Sentences, rules: Rules) -> Progress:
    """Returns a search before its first position."""
    beam = strategy.start(sentences, rules)
    return Progress(jnp.zeros((), jnp.int32), sentences.max_length <= 0, sentences, beam, state)


def extend_until(
    strategy: Strategy, step: Step, progress: Progress, rules: Rules, leave_at: int | Index = 0
) -> Progress:
    """Returns the search once all sentences are done, or its arrays are full.

    It is left earlier, at a multiple of `STRIDE` positions, if at most `leave_at` sentences are
    unfinished then. It always advances by at least one position, so that a search that was left
    can go on.
    """
    first = progress.position

    def goes_on(progress: Progress) -> Bool[Array, ""]:
        unfinished = jnp.sum(~progress.done)
        may_leave = (progress.position % STRIDE == 0) & (progress.position != first)
        stays = (unfinished > leave_at) | ~may_leave
        return (progress.position < rules.max_length) & (unfinished > 0) & stays

    return jax.lax.while_loop(goes_on, partial(strategy.extend, step, rules), progress)


# What strategies have in common


class Scored(NamedTuple):
    """Scores of the next id."""

    log_probs: Float[Array, "B K V"]  # after the processors
    context: SearchContext
    logits: Float[Array, "B K V"]  # of the model
    total: Float[Array, "B K 1"]  # the log of the sum of their exponentials

    def by_model(self, beams: Int[Array, "#B *C"], ids: Int[Array, "B *C"]) -> Float[Array, "B *C"]:
        """Returns the model's own log probabilities of some ids after some hypotheses."""
        rows = jnp.arange(ids.shape[0]).reshape(-1, *[1] * (ids.ndim - 1))
        return self.logits[rows, beams, ids] - self.total[rows, beams, 0]


def score_next(
    logits: LogProbs, ids: Int[Array, "B K T"], index: Index, sentences: Sentences, rules: Rules
) -> Scored:
    """Returns the log probabilities of the next id in float32, and those after the processors."""
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    log_probs = logits - total
    context = SearchContext(index, ids, log_probs, sentences)
    for process in rules.processors:
        log_probs = process(log_probs, context)
    return Scored(log_probs, context, logits, total)


def no_ids(shape: tuple[Size, int], rules: Rules) -> Hypotheses:
    """Returns [B, K] hypotheses without ids."""
    zeros = jnp.zeros(shape, jnp.float32)
    return Hypotheses(jnp.full((*shape, rules.max_length), PAD, jnp.int32), zeros, zeros)


def pad_ids(beam: Any, length: int) -> Any:
    """Returns `Progress.beam`, all hypotheses in it with `ids` padded to `length` positions."""

    def padded(hypotheses: Hypotheses) -> Hypotheses:
        widths = ((0, 0), (0, 0), (0, length - hypotheses.ids.shape[2]))
        return hypotheses._replace(ids=jnp.pad(hypotheses.ids, widths, constant_values=PAD))

    return map_nodes(padded, Hypotheses, beam)


def finished(hypotheses: Hypotheses, rules: Rules) -> Hypotheses:
    """Returns the hypotheses with their final scores, the model's own with the length penalty.

    One that is empty or impossible has no ids and -inf.
    """
    length = jnp.sum(hypotheses.ids != PAD, axis=2)
    exists = (length > 0) & (hypotheses.scores > -jnp.inf)
    length = jnp.maximum(length, 1).astype(jnp.float32)
    penalized = rules.length_penalty(hypotheses.log_probs, length)
    ids = jnp.where(exists[:, :, None], hypotheses.ids, PAD)
    return Hypotheses(ids, jnp.where(exists, penalized, -jnp.inf), hypotheses.log_probs)


def last_ids(live: Hypotheses, index: Index, rules: Rules) -> Int[Array, "B K"]:
    """Returns the last id of each hypothesis, which the step reads; at first the start symbol."""
    before = live.ids[:, :, jnp.maximum(index - 1, 0)]
    return jnp.where(index == 0, rules.start_id, before).astype(jnp.int32)


def reorder(state: Any, parents: Int[Array, "B K"]) -> Any:
    """Returns the state of hypotheses that continue those with the indices `parents`.

    Reorders each `DecodeState` or `LayerState` in it. Other arrays stay as they are.
    """
    return map_nodes(lambda node: node.reordered(parents), DecodeState | LayerState, state)


# Strategies that extend each hypothesis by itself


class Chosen(NamedTuple):
    """The hypotheses of a search that extends each one by a single id."""

    live: Hypotheses
    ended: Bool[Array, "B K"]


Choose = Callable[[Float[Array, "B K V"], SearchContext], Int[Array, "B K"]]
"""(log probabilities after the processors, context) -> the next id of each hypothesis."""


def greedy() -> Strategy:
    """Returns the search of one hypothesis per sentence, with the likeliest id at each position."""
    return _extending_each(1, lambda log_probs, _: first_argmax(log_probs))


def sample(count: int) -> Strategy:
    """Returns the search of `count` independent samples per sentence, the best scores first.

    An id is drawn with the probabilities after the processors, renormalized. The rng is
    `Sentences.keys` folded with the number of the sample and the position.
    """

    def choose(log_probs: Float[Array, "B K V"], context: SearchContext) -> Int[Array, "B K"]:
        assert context.sentences.keys is not None

        def draw(key: Any, number: Any, log_probs: Float[Array, " V"]) -> Int[Array, ""]:
            key = jax.random.fold_in(jax.random.wrap_key_data(key), number)
            key = jax.random.fold_in(key, context.position)
            return jax.random.categorical(key, log_probs)

        draws = jax.vmap(jax.vmap(draw, (None, 0, 0)), (0, None, 0))
        return draws(context.sentences.keys, jnp.arange(count), log_probs).astype(jnp.int32)

    return _extending_each(count, choose)


def _extending_each(count: int, choose: Choose) -> Strategy:
    """Returns the search of `count` hypotheses per sentence that extends each by a chosen id."""

    def start(sentences: Sentences, rules: Rules) -> Chosen:
        shape = (sentences.max_length.shape[0], count)
        ended = jnp.broadcast_to(sentences.max_length[:, None] <= 0, shape)
        return Chosen(no_ids(shape, rules), ended)

    def extend_each(step: Step, rules: Rules, progress: Progress) -> Progress:
        index, _, sentences, (live, ended), state = progress
        logits, state, _ = step(last_ids(live, index, rules), state, index)
        scored = score_next(logits, live.ids, index, sentences, rules)
        chosen = jnp.where(ended, PAD, choose(scored.log_probs, scored.context))
        gained = jnp.take_along_axis(scored.log_probs, chosen[..., None], axis=-1)[..., 0]
        log_probs = scored.by_model(jnp.arange(count)[None, :, None], chosen[..., None])[..., 0]
        ids = jax.lax.dynamic_update_index_in_dim(live.ids, chosen, index, axis=2)
        scores = live.scores + jnp.where(ended, 0.0, gained)
        live = Hypotheses(ids, scores, live.log_probs + jnp.where(ended, 0.0, log_probs))
        at_limit = index + 1 >= sentences.max_length[:, None]
        ended = ended | (chosen == rules.end_id) | at_limit
        done = jnp.all(ended, axis=1)
        return Progress(index + 1, done, sentences, Chosen(live, ended), state)

    return Strategy(count, start, extend_each, _best_first)


def _best_first(beam: Chosen, rules: Rules) -> Hypotheses:
    """Returns the hypotheses, sorted by their final scores."""
    hypotheses = finished(beam.live, rules)
    _, order = jax.lax.top_k(hypotheses.scores, hypotheses.scores.shape[1])
    return take_beams(hypotheses, order)
