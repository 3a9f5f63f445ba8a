"""One `Step` for one model or for several, whose probabilities are averaged."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from transformer_jax.decoding.search import Step
from transformer_jax.models.transformer import Model
from transformer_jax.types import Params, Size


def prefill(
    models: Sequence[Model],
    params: Sequence[Params],
    source: Int[Array, "B S"],
    beams: int,
    length: Size,
) -> tuple[Any, ...]:
    """Returns the initial state of each model, for `beams` hypotheses of at most `length` ids."""
    return tuple(
        model.apply({"params": model_params}, source, beams, length, method="prefill")
        for model, model_params in zip(models, params, strict=True)
    )


def grow_state(models: Sequence[Model], states: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    """Returns the state of each model, padded to `length` positions."""
    return tuple(model.grow(state, length) for model, state in zip(models, states, strict=True))


def make_step(models: Sequence[Model], params: Sequence[Params]) -> Step:
    """Returns the step of the models. Of several, the logits are logs of mean probabilities.

    The first ids are replaced by the start id of each model. The models may have any size, but must
    have the same ids. (Sutskever et al. 2014, section 3.2)
    """

    def step(ids: Int[Array, "B K"], states: tuple[Any, ...], index: Int[Array, ""]) -> Any:
        logits, new_states = [], []
        for model, model_params, state in zip(models, params, states, strict=True):
            start = model.config.start_id
            previous = jnp.where(index == 0, start, ids).astype(jnp.int32)
            variables = {"params": model_params}
            output: Any = model.apply(variables, previous, state, index, method="decode_step")
            logits.append(output[0])
            new_states.append(output[1])
        return _mean(logits), tuple(new_states), None

    return step


def _mean(logits: Sequence[Array]) -> Array:
    """Returns the log of the mean of the models' probabilities; for one model its logits."""
    if len(logits) == 1:
        return logits[0]
    log_probs = jnp.stack([jax.nn.log_softmax(x.astype(jnp.float32)) for x in logits])
    return jax.nn.logsumexp(log_probs, axis=0) - jnp.log(len(logits))
