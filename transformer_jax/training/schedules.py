"""Learning-rate schedules. To add one, write its function and its entry in `SCHEDULES`."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from transformer_jax.config import Config, OptimizerConfig, look_up

Decay = Callable[[Float[Array, ""], OptimizerConfig], Float[Array, ""]]
"""(update, counted from 1, config) -> the fraction of the peak, from the end of warm-up on."""


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule: its decay after the linear warm-up, and what it needs."""

    decay: Decay
    ends: bool = False
    """Whether it reaches 0, at `decay_steps`."""
    scaled_by_width: bool = False
    """Whether `learning_rate` multiplies (d_model · warmup)^-0.5 instead of being the peak."""


def inverse_sqrt(step: Float[Array, ""], config: OptimizerConfig) -> Float[Array, ""]:
    """Returns √(warmup / step)."""
    return jnp.sqrt(config.warmup / jnp.maximum(step, config.warmup))


def linear(step: Float[Array, ""], config: OptimizerConfig) -> Float[Array, ""]:
    """Returns 1 at the end of warm-up and 0 from `decay_steps` on, and interpolates linearly."""
    left = (step - config.warmup) / ((config.decay_steps or 0) - config.warmup)
    return 1 - jnp.clip(left, 0, 1)


def cosine(step: Float[Array, ""], config: OptimizerConfig) -> Float[Array, ""]:
    """Returns half a cosine wave from 1 to 0 (Loshchilov and Hutter 2017)."""
    return (1 - jnp.cos(jnp.pi * linear(step, config))) / 2


SCHEDULES: dict[str, Schedule] = {
    "noam": Schedule(inverse_sqrt, scaled_by_width=True),
    "inverse_sqrt": Schedule(inverse_sqrt),
    "cosine": Schedule(cosine, ends=True),
    "linear": Schedule(linear, ends=True),
}
"""Schedules by their name in the config."""


def find_schedule(config: OptimizerConfig) -> Schedule:
    """Returns the config's schedule. UserError: it is unknown, or `decay_steps` does not fit it."""
    schedule = look_up(SCHEDULES, config.schedule, "optimizer.schedule")
    end, which = config.decay_steps, f"for the {config.schedule} schedule"
    if schedule.ends:
        want = f"above optimizer.warmup={config.warmup} {which}"
        config.require(end is not None and end > config.warmup, "decay_steps", want)
    else:
        config.require(end is None, "decay_steps", f"None {which}, which never reaches 0")
    return schedule


def describe_end(config: Config, batches_per_epoch: int) -> list[str]:
    """Returns a line on where the learning rate of a checked config becomes 0, if it does."""
    end, options = config.optimizer.decay_steps, config.train
    if end is None:
        return []
    limits = (options.steps, (options.epochs or 0) * batches_per_epoch)
    last = min(filter(None, limits), default=0)
    beyond = f"; training to step {last} changes no parameter after it" if last > end else ""
    return [f"learning rate: 0 from step {end} on (optimizer.decay_steps){beyond}"]


def learning_rate(config: OptimizerConfig, d_model: int) -> optax.Schedule:
    """Returns the learning rate by update, counted from 0: linear warm-up to the peak, then decay.

    `noam` is learning_rate · d_model^-0.5 · min(step^-0.5, step · warmup^-1.5) (section 5.3, eq.
    3); `inverse_sqrt` has the same shape with learning_rate as the peak; `cosine` and `linear`
    reach 0 at decay_steps. UserError: as `find_schedule`.
    """
    schedule = find_schedule(config)
    peak = config.learning_rate
    if schedule.scaled_by_width:
        peak *= (d_model * config.warmup) ** -0.5

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(count, jnp.float32) + 1
        return peak * jnp.minimum(step / config.warmup, 1) * schedule.decay(step, config)

    return rate
