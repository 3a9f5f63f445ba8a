"""Greedy search and sampling: strategies that extend each hypothesis by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.decoding.processors import SearchContext, Sentences
from transformer_jax.decoding.search import (
    Hypotheses,
    Live,
    Progress,
    Rules,
    Step,
    Strategy,
    last_ids,
    no_ids,
    pad_ids,
    score_next,
)
from transformer_jax.decoding.top_k import first_argmax
from transformer_jax.special_ids import PAD
from transformer_jax.types import take_beams


class _Beam(NamedTuple):
    live: Live
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

    def start(sentences: Sentences, rules: Rules) -> _Beam:
        shape = (sentences.max_length.shape[0], count)
        ended = jnp.broadcast_to(sentences.max_length[:, None] <= 0, shape)
        return _Beam(no_ids(shape, rules), ended)

    def extend_each(step: Step, rules: Rules, progress: Progress) -> Progress:
        index, _, sentences, (live, ended), state = progress
        logits, state, _ = step(last_ids(live, index, rules), state, index)
        scored = score_next(logits, live.ids, index, sentences, rules)
        chosen = jnp.where(ended, PAD, choose(scored.log_probs, scored.context))
        gained = jnp.take_along_axis(scored.log_probs, chosen[..., None], axis=-1)[..., 0]
        log_probs = scored.by_model(jnp.arange(count)[None, :, None], chosen[..., None])[..., 0]
        ids = jax.lax.dynamic_update_index_in_dim(live.ids, chosen, index, axis=2)
        scores = live.scores + jnp.where(ended, 0.0, gained)
        live = Live(ids, scores, live.log_probs + jnp.where(ended, 0.0, log_probs))
        at_limit = index + 1 >= sentences.max_length[:, None]
        ended = ended | (chosen == rules.end_id) | at_limit
        done = jnp.all(ended, axis=1)
        return Progress(index + 1, done, sentences, _Beam(live, ended), state)

    def grow(beam: _Beam, length: int) -> _Beam:
        return beam._replace(live=pad_ids(beam.live, length))

    return Strategy(count, start, extend_each, _best_first, grow)


def _best_first(beam: _Beam, rules: Rules) -> Hypotheses:
    """Returns the hypotheses, sorted by their scores; one that is empty or impossible has -inf."""
    live, _ = beam
    length = jnp.sum(live.ids != PAD, axis=2)
    exists = (length > 0) & (live.scores > -jnp.inf)
    length = jnp.maximum(length, 1).astype(jnp.float32)
    scores = jnp.where(exists, rules.length_penalty(live.log_probs, length), -jnp.inf)
    scores, order = jax.lax.top_k(scores, scores.shape[1])
    ids = jnp.where(exists[:, :, None], live.ids, PAD)
    return Hypotheses(take_beams(ids, order), scores, take_beams(live.log_probs, order))
