"""One update and one evaluation as pure functions: no jit, no devices, no I/O."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from transformer_jax.types import Batch, Key, Params

LossFn = Callable[..., tuple[Float[Array, ""], Any]]
"""(params, batch, dropout key) -> (sum of the tokens' losses, number of tokens).

With something in `TrainState.extra`, which is then a fourth argument: (sum, (number of tokens, sums
over them of what `extra` follows))."""

Metrics = dict[str, Array]


_DECAY = 0.9
"""Of the running means in `TrainState.extra` (Xu et al. 2015, section 4.1)."""


class TrainState(NamedTuple):
    """All that training changes."""

    step: Int[Array, ""]
    params: Params
    opt_state: optax.OptState
    ema: Params | None  # moving average of params, if kept
    extra: Params  # running means a token of what the loss follows, such as a baseline

    @property
    def weights(self) -> Params:
        """The parameters to evaluate and to translate with."""
        return self.params if self.ema is None else self.ema


def init_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    ema: float | None = None,
    extra: Params | None = None,
) -> TrainState:
    """The state before the first update."""
    average = None if ema is None else jax.tree.map(jnp.copy, params)
    step = jnp.zeros((), jnp.int32)
    return TrainState(step, params, optimizer.init(params), average, extra or {})


def gradients(
    params: Params, batch: Batch, key: Key | None, *, loss: LossFn, accumulate: int = 1
) -> tuple[Params, Float[Array, ""], Any]:
    """Gradient of the summed loss, that sum, and what the loss counts beside it.

    With `accumulate` above 1 the rows are computed in so many pieces, one after the other; piece i
    holds every `accumulate`-th row, so that each device keeps its rows. ValueError: the rows do not
    divide into so many pieces.
    """
    grad = jax.value_and_grad(loss, has_aux=True)
    if accumulate == 1:
        (total, counts), gradient = grad(params, batch, key)
        return gradient, total, counts

    rows = batch.source.shape[0]
    if rows % accumulate:
        raise ValueError(
            f"optimizer.accumulate={accumulate}: must divide the {rows} rows of a batch"
        )

    def piece(carry: tuple, indexed: tuple[Array, Batch]) -> tuple[tuple, None]:
        index, rows = indexed
        subkey = None if key is None else jax.random.fold_in(key, index)
        (total, counts), gradient = grad(params, rows, subkey)
        return jax.tree.map(jnp.add, carry, (gradient, total, counts)), None

    pieces = jax.tree.map(lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch)
    (total, counts), _ = jax.eval_shape(grad, params, jax.tree.map(lambda x: x[0], pieces), key)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (params, total, counts))
    summed, _ = jax.lax.scan(piece, zeros, (jnp.arange(accumulate), pieces))
    return summed


def train_step(
    state: TrainState,
    batch: Batch,
    key: Key,
    *,
    loss: LossFn,
    optimizer: optax.GradientTransformation,
    accumulate: int = 1,
    ema: float | None = None,
    reduce: Callable = lambda tree: tree,
) -> tuple[TrainState, Metrics]:
    """One update: gradient of the summed loss over the global number of tokens, then the optimizer.

    `key` is the run's; the step's own is folded in. `reduce` sums a tree over the devices where
    each sees its own rows only. Metrics: loss (nats a token, with smoothing), tokens, grad_norm.
    """
    key = jax.random.fold_in(key, state.step)
    if state.extra:
        loss = partial(_with_extra, loss, state.extra)
    summed = reduce(gradients(state.params, batch, key, loss=loss, accumulate=accumulate))
    gradient, total, counts = summed
    count, sums = counts if state.extra else (counts, {})
    tokens = jnp.maximum(count, 1).astype(jnp.float32)
    gradient = jax.tree.map(lambda g: g / tokens, gradient)
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    params = jax.tree.map(jnp.add, state.params, updates)
    average = state.ema
    if ema is not None:
        # Young averages forget the initial weights sooner: decay (1 + t) / (10 + t) at first.
        step = state.step.astype(jnp.float32)
        decay = jnp.minimum(ema, (1 + step) / (10 + step))
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, average, params)
    # Young means follow sooner: decay 0.1, 2/11, ... at first.
    decay = jnp.minimum(_DECAY, (1 + state.step) / (10 + state.step))
    extra = jax.tree.map(lambda m, s: decay * m + (1 - decay) * s / tokens, state.extra, sums)
    state = TrainState(state.step + 1, params, opt_state, average, extra)
    metrics = {"loss": total / tokens, "tokens": count, "grad_norm": optax.tree.norm(gradient)}
    return state, metrics


def _with_extra(loss: LossFn, extra: Params, params: Params, batch: Batch, key: Key | None) -> Any:
    return loss(params, batch, key, extra)


def eval_step(
    params: Params, batch: Batch, *, loss: LossFn, reduce: Callable = lambda tree: tree
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Sum of the tokens' losses and their number, without dropout."""
    return reduce(loss(params, batch, None))
