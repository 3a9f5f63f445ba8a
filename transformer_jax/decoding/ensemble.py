"""One `Step` for one model or for several, whose probabilities are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from transformer_jax.decoding.search import Step
from transformer_jax.models.base import Model
from transformer_jax.types import DecodeState, Params, Size


def prefill(
    models: Sequence[Model],
    params: Sequence[Params],
    source: Int[Array, "B S"],
    beams: int,
    length: Size,
) -> DecodeState:
    """Returns the initial state of all models, for `beams` hypotheses of at most `length` ids."""
    states: list[Any] = [
        model.apply({"params": model_params}, source, beams, length, method="prefill")
        for model, model_params in zip(models, params, strict=True)
    ]
    return DecodeState(tuple(s.memory for s in states), tuple(s.beams for s in states))


def grow_state(models: Sequence[Model], state: DecodeState, length: int) -> DecodeState:
    """Returns the state of all models, padded to `length` positions."""
    states = [
        model.grow(DecodeState(*parts), length)
        for model, *parts in zip(models, *state, strict=True)
    ]
    return DecodeState(tuple(s.memory for s in states), tuple(s.beams for s in states))


def make_step(models: Sequence[Model], params: Sequence[Params]) -> Step:
    """Returns the step of the models. Of several, the logits are logs of mean probabilities.

    The first ids are replaced by the start id of each model. The models may have any size, but must
    have the same ids. (Sutskever et al. 2014, section 3.2)
    """

    def step(ids: Int[Array, "B K"], state: DecodeState, index: Int[Array, ""]) -> Any:
        logits, memories, beams = [], [], []
        for model, model_params, *parts in zip(models, params, *state, strict=True):
            start = model.config.decoder_start_id
            previous = jnp.where(index == 0, start, ids).astype(jnp.int32)
            variables = {"params": model_params}
            output: Any = model.apply(
                variables, previous, DecodeState(*parts), index, method="decode_step"
            )
            logits.append(output[0])
            memories.append(output[1].memory)
            beams.append(output[1].beams)
        return _mean(logits), DecodeState(tuple(memories), tuple(beams)), None

    return step


def _mean(logits: Sequence[Array]) -> Array:
    """Returns the log of the mean of the models' probabilities; for one model its logits."""
    if len(logits) == 1:
        return logits[0]
    log_probs = jnp.stack([jax.nn.log_softmax(x.astype(jnp.float32)) for x in logits])
    return jax.nn.logsumexp(log_probs, axis=0) - jnp.log(len(logits))
