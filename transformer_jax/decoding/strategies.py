"""Chooses the search strategy, the length penalty and the logits processors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from transformer_jax.config import DecodeConfig
from transformer_jax.decoding.search import (
    NO_PADDING,
    Hypotheses,
    LogitsProcessor,
    Penalty,
    beam_search,
    gnmt_penalty,
    greedy,
    power_penalty,
)
from transformer_jax.models.base import Model
from transformer_jax.special_ids import EOS, PAD
from transformer_jax.types import DecodeState, Params

PENALTIES: dict[str, Callable[[float], Penalty]] = {"gnmt": gnmt_penalty, "power": power_penalty}
"""Length penalties by their name in the config, as functions of the exponent."""

PROCESSORS: list[LogitsProcessor] = [NO_PADDING]
"""The logits processors of every search, in the order in which they are applied."""

Strategy = Callable[..., Hypotheses]
"""(step, state, *, lengths, max_length, start_id, end_id, penalty, processors) -> hypotheses."""


def choose_strategy(config: DecodeConfig) -> Strategy:
    """Returns the search that `config` asks for."""
    return greedy if config.beam == 1 else partial(beam_search, beams=config.beam)


def make_search(
    model: Model, config: DecodeConfig
) -> Callable[[Params, Int[Array, "B S"]], Hypotheses]:
    """Returns a pure function (params, source [B, S]) -> hypotheses."""
    strategy = choose_strategy(config)
    options: dict[str, Any] = {
        "start_id": model.config.decoder_start_id,
        "end_id": EOS,
        "penalty": PENALTIES[config.penalty](config.alpha),
        "processors": PROCESSORS,
    }

    def search(params: Params, source: Int[Array, "B S"]) -> Hypotheses:
        variables = {"params": params}
        max_length = output_limit(model, source.shape[1])
        tokens = jnp.sum(source != PAD, axis=1)
        lengths = jnp.where(tokens > 0, jnp.minimum(output_limit(model, tokens), max_length), 0)
        state: Any = model.apply(variables, source, config.beam, max_length, method="prefill")

        def step(ids: Int[Array, "B K"], state: DecodeState, index: Int[Array, ""]) -> Any:
            return model.apply(variables, ids, state, index, method="decode_step")

        return strategy(step, state, lengths=lengths, max_length=max_length, **options)

    return search


def output_limit(model: Model, length: Any) -> Any:
    """Returns the maximum output length for a source of `length` tokens.

    It is 2 · length + 10, but at most `model.max_length`.
    """
    limit = 2 * length + 10
    most = model.config.max_length
    return min(limit, most) if isinstance(limit, int) else jnp.minimum(limit, most)
