"""The loss, one update and one evaluation as pure functions: no jit, no devices, no I/O."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from transformer_jax.errors import UserError
from transformer_jax.models.parameter_paths import merge, split
from transformer_jax.models.transformer import Model
from transformer_jax.training.losses import auxiliary_losses, symmetric_divergence, token_loss
from transformer_jax.types import Batch, Key, Mean, Params

Averages = dict[str, Array]
"""Running means by name, float32 scalars."""


class LossSums(NamedTuple):
    """Sums that a loss returns besides its own; they add over devices and microbatches."""

    tokens: Int[Array, ""]
    metrics: dict[str, Mean]


LossFn = Callable[[Params, Batch, Key | None, Averages], tuple[Float[Array, ""], LossSums]]
"""(params, batch, rng, running means) -> (sum of the losses of the target tokens, other sums)."""

Metrics = dict[str, Array]
"""Float32 scalars by name; "tokens" is an int32."""

AVERAGE_DECAY = 0.9
"""Decay of the running means in `TrainState.averages` (Xu et al. 2015, section 4.1)."""


class TrainState(NamedTuple):
    """The state that training updates."""

    step: Int[Array, ""]
    params: Params
    opt_state: optax.OptState
    ema: Params | None  # moving average of the parameters that are not frozen; None: off
    averages: Averages  # running means of the metrics that auxiliary losses depend on

    @property
    def eval_params(self) -> Params:
        """The parameters for evaluation and translation."""
        return self.params if self.ema is None else merge(self.params, self.ema)


def init_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    ema: float | None = None,
    averages: Averages | None = None,
    frozen: Sequence[str] = (),
) -> TrainState:
    """Returns the state before the first update; `frozen` is that of `train_step`."""
    _, trained = split(params, frozen)
    copy = None if ema is None else jax.tree.map(jnp.copy, trained)
    step = jnp.zeros((), jnp.int32)
    return TrainState(step, params, optimizer.init(trained), copy, averages or {})


def train_only(loss: LossFn, frozen: Params) -> LossFn:
    """Returns the loss as a function of the parameters that are not frozen."""
    return lambda trained, *others: loss(merge(frozen, trained), *others)


def loss_fn(model: Model, smoothing: float = 0.0, r_drop: float = 0.0) -> LossFn:
    """Returns the loss function of a model for `train_step` and `eval_step`.

    smoothing: as in `token_loss`. r_drop: weight α of R-Drop (Liang et al. 2021, formula 4), which
    has no effect in evaluation. Each pair then has two rows, and its loss is their mean.
    """

    def loss(
        params: Params, batch: Batch, key: Key | None, averages: Averages
    ) -> tuple[Float[Array, ""], LossSums]:
        twice = bool(r_drop) and key is not None
        if twice:  # adjacent rows stay on one device
            batch = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), batch)
        output: Any = model.apply({"params": params}, batch, key)
        total, count = token_loss(output.logits, batch.target_out, smoothing)
        if twice:
            total += r_drop / 2 * symmetric_divergence(output.logits, batch.target_out)
        auxiliary, metrics = auxiliary_losses(output, batch.target_out, averages)
        total += auxiliary
        if twice:
            total, count = total / 2, count // 2
        return total, LossSums(count, output.metrics | metrics)

    return loss


def gradients(
    params: Params,
    batch: Batch,
    key: Key | None,
    averages: Averages,
    *,
    loss: LossFn,
    accumulate: int = 1,
) -> tuple[Params, Float[Array, ""], LossSums]:
    """Returns the gradient of the summed loss, the sum, and the other sums of the loss.

    With `accumulate` above 1, the rows are split into that many microbatches, which are computed
    one after the other. Microbatch i holds every `accumulate`-th row, so that each device keeps its
    rows. UserError: `accumulate` does not divide the number of rows.
    """
    grad = jax.value_and_grad(loss, has_aux=True)
    if accumulate == 1:
        (total, sums), gradient = grad(params, batch, key, averages)
        return gradient, total, sums

    rows = batch.source.shape[0]
    if rows % accumulate:
        raise UserError(
            f"optimizer.accumulate={accumulate}: must divide the {rows} rows of a batch"
        )

    # A scan adds up the gradients and sums of the microbatches, so that the activations of only one
    # are in memory. Each has an rng of its own, so that their dropout masks differ.
    def add(carry: tuple, indexed: tuple[Array, Batch]) -> tuple[tuple, None]:
        index, microbatch = indexed
        subkey = None if key is None else jax.random.fold_in(key, index)
        (total, sums), gradient = grad(params, microbatch, subkey, averages)
        return jax.tree.map(jnp.add, carry, (gradient, total, sums)), None

    microbatches = jax.tree.map(
        lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch
    )
    first = jax.tree.map(lambda x: x[0], microbatches)
    (total, sums), _ = jax.eval_shape(grad, params, first, key, averages)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (params, total, sums))
    summed, _ = jax.lax.scan(add, zeros, (jnp.arange(accumulate), microbatches))
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
    frozen: Sequence[str] = (),
    reduce: Callable = lambda tree: tree,
) -> tuple[TrainState, Metrics]:
    """Returns the state after one update, and the metrics of the step by name.

    The gradient is that of the summed loss, divided by the global number of tokens. `key` is the
    run's; the step is folded into it. `reduce` sums a tree over devices, if each of them sees only
    its own rows. The metrics are loss (nats per token, with smoothing and auxiliary losses),
    tokens, grad_norm, and the means that the loss reports. If the loss or the norm of the gradient
    is not finite, nothing changes but the step. `frozen` parameters, as in `OptimizerConfig`, are
    constants: `optimizer` does not know of them.
    """
    summed = summed_gradients(
        state, batch, key, loss=loss, accumulate=accumulate, frozen=frozen, reduce=reduce
    )
    return apply_gradients(state, *summed, optimizer=optimizer, ema=ema, frozen=frozen)


def summed_gradients(
    state: TrainState,
    batch: Batch,
    key: Key,
    *,
    loss: LossFn,
    accumulate: int = 1,
    frozen: Sequence[str] = (),
    reduce: Callable = lambda tree: tree,
) -> tuple[Params, Float[Array, ""], LossSums]:
    """Returns what `gradients` does, of the whole batch: the first half of a `train_step`."""
    key = jax.random.fold_in(key, state.step)
    constants, trained = split(state.params, frozen)
    loss = train_only(loss, constants)
    return reduce(gradients(trained, batch, key, state.averages, loss=loss, accumulate=accumulate))


def apply_gradients(
    state: TrainState,
    gradient: Params,
    total: Float[Array, ""],
    sums: LossSums,
    *,
    optimizer: optax.GradientTransformation,
    ema: float | None = None,
    frozen: Sequence[str] = (),
) -> tuple[TrainState, Metrics]:
    """Returns the state and the metrics after an update by summed gradients: the second half of a
    `train_step`."""
    constants, trained = split(state.params, frozen)
    # Divided after the sum over devices and microbatches, so that their number makes no difference.
    tokens = jnp.maximum(sums.tokens, 1).astype(jnp.float32)
    gradient = jax.tree.map(lambda g: g / tokens, gradient)
    updates, opt_state = optimizer.update(gradient, state.opt_state, trained)
    trained = jax.tree.map(jnp.add, trained, updates)
    average = state.ema if ema is None else _moved(state.ema, trained, ema, state.step)
    means = {name: m.total / jnp.maximum(m.weight, 1) for name, m in sums.metrics.items()}
    newest = {name: means[name] for name in state.averages}
    averages = _moved(state.averages, newest, AVERAGE_DECAY, state.step)
    metrics = {"loss": total / tokens, "tokens": sums.tokens}
    metrics["grad_norm"] = optax.tree.norm(gradient)
    # A step that is not finite keeps all of the old state; only the number of the step goes on.
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    params = merge(constants, trained)
    updated = TrainState(state.step, params, opt_state, average, averages)
    state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)
    state = state._replace(step=state.step + 1)
    return state, metrics | means


def _moved(averages: Any, newest: Any, limit: float, step: Int[Array, ""]) -> Any:
    """Returns a tree of moving averages, moved towards new values.

    The decay is 0.1, 2/11, ... up to `limit`. A small one at first makes the averages forget their
    initial values faster.
    """
    step = step.astype(jnp.float32)
    decay = jnp.minimum(limit, (1 + step) / (10 + step))
    return jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, averages, newest)


def eval_step(
    params: Params, batch: Batch, *, loss: LossFn, reduce: Callable[[Any], Any] = lambda tree: tree
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Returns the sum of the losses of the target tokens and their number, without dropout."""
    total, sums = loss(params, batch, None, {})
    return reduce((total, sums.tokens))
