"""Computations of a model or a step in two ways that must agree, for `check` and for tests.

Each returns the largest difference between the two.
"""

from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from transformer_jax.models.embedding import Embedding
from transformer_jax.models.make import abstract_model
from transformer_jax.models.transformer import Model
from transformer_jax.parallel.mesh import shard_batch
from transformer_jax.parallel.parameters import shard_tree
from transformer_jax.special_ids import PAD
from transformer_jax.training.setup import StepSetup
from transformer_jax.training.step import gradients
from transformer_jax.types import Batch, Params


def random_params(model: Model, seed: int = 0) -> Params:
    """Returns parameters none of which is 0 or 1, so that every term affects the output."""
    sizes = model.source_vocabulary, model.target_vocabulary
    draw = np.random.default_rng(seed)

    def array(path: Any, leaf: Any) -> jax.Array:
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(draw.normal(mean, 0.2, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(array, abstract_model(model.config, *sizes)[1])


def largest(errors: Iterable[Any]) -> float:
    """Returns the largest error: NaN, which is within no limit, if one is NaN."""
    return float(np.max([np.max(each) for each in errors]))


def relative_error(actual: Any, wanted: Any) -> float:
    """Returns the largest difference of two arrays, as a share of the largest element wanted."""
    actual, wanted = (np.asarray(x, np.float64) for x in (actual, wanted))
    return largest([np.abs(actual - wanted) / np.max(np.abs(wanted))])


def gradient_errors(actual: Params, wanted: Params) -> Params:
    """Returns the error of each leaf, as a share of its norm or of 1/1000 of the whole's norm."""
    whole = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(wanted)))

    def error(a: Any, b: Any) -> float:
        difference = np.linalg.norm(np.asarray(a) - np.asarray(b))
        return float(difference / max(np.linalg.norm(b), 1e-3 * whole))

    return jax.tree.map(error, actual, wanted)


def logits_of(model: Model, params: Params, batch: Batch) -> Float[np.ndarray, "B T V"]:
    """Returns the logits of a batch with teacher forcing."""
    output: Any = jax.jit(model.apply)({"params": params}, batch)
    return np.asarray(output.logits, np.float32)


def decode_steps(
    model: Model,
    params: Params,
    source: Int[np.ndarray, "B S"],
    targets: Int[np.ndarray, "B K T"],
    first: int,
) -> tuple[Float[Array, "B K T V"], dict[str, Array]]:
    """Returns the logits of decoding step by step, each hypothesis with its own target, and the
    weights [T, B, N, K, S] of each layer. The state is for `first` positions, and then grows."""
    beams, length = targets.shape[1:]

    @jax.jit
    def decode(params: Params, source: Any, targets: Any) -> Any:
        variables = {"params": params}

        def advance(state: Any, indexed: Any) -> Any:
            out: Any = model.apply(variables, indexed[0], state, indexed[1], method="decode_step")
            logits, state, auxiliary = out
            return state, (logits, auxiliary.weights)

        steps = jnp.moveaxis(targets, 2, 0), jnp.arange(length)
        state = model.apply(variables, source, beams, first, method="prefill")
        state, begun = jax.lax.scan(advance, state, jax.tree.map(lambda x: x[:first], steps))
        state = model.grow(state, length)
        _, ended = jax.lax.scan(advance, state, jax.tree.map(lambda x: x[first:], steps))
        return jax.tree.map(join, begun, ended)

    def join(begun: Array, ended: Array) -> Array:
        missing = ended.shape[-1] - begun.shape[-1]  # in weights of a shorter state
        widths = [(0, 0)] * (begun.ndim - 1) + [(0, missing)]
        return jnp.concatenate([jnp.pad(begun, widths), ended])

    logits, weights = decode(params, source, targets)
    return jnp.moveaxis(logits, 0, 2), weights


def decoding_error(model: Model, params: Params, batch: Batch) -> float:
    """Returns how far the logits of decoding with caches are from those of teacher forcing, for two
    hypotheses of each sentence."""
    targets = np.stack([batch.target_in, np.roll(batch.target_in, 1, axis=0)], axis=1)
    batches = [batch._replace(target_in=targets[:, beam]) for beam in (0, 1)]
    wanted = np.stack([logits_of(model, params, each) for each in batches], axis=1)
    first = targets.shape[2] // 2
    logits, _ = decode_steps(model, params, batch.source, targets, first)
    return relative_error(logits, wanted)


def visibility(model: Model, params: Params, batch: Batch) -> float:
    """Returns the largest gradient of the logits with respect to a position that they must not see:
    a later one of the target, padding, or one of another row."""
    batch = jax.tree.map(jnp.asarray, batch)
    direction = np.random.default_rng(0).normal(size=model.target_vocabulary)

    def summed(deltas: list[Array]) -> Float[Array, "B T"]:
        waiting = list(deltas)

        def add(call: Any, arguments: Any, options: Any, context: Any) -> Any:
            embeds = isinstance(context.module, Embedding) and context.method_name == "__call__"
            x = call(*arguments, **options)
            return x + waiting.pop(0) if embeds else x  # the source is embedded first

        with nn.intercept_methods(add):
            output: Any = model.apply({"params": params}, batch)
        return output.logits @ direction

    sides = [batch.source] if model.config.labels else [batch.source, batch.target_in]
    zeros = [jnp.zeros((*side.shape, model.config.d_model)) for side in sides]
    jacobian = [np.abs(each).max(axis=-1) for each in jax.jit(jax.jacrev(summed))(zeros)]
    rows, length = np.asarray(batch.target_out).shape
    same_row = np.eye(rows, dtype=bool)[:, None, :, None]
    causal = np.tri(length, dtype=bool)[None, :, None, :]
    # The decoder may read `PAD` first, so that its tokens are known by what it predicts from them.
    tokens = (batch.source, batch.target_out)[: len(sides)]
    seen = [same_row & (np.asarray(side) != PAD) for side in tokens]
    seen[1:] = [each & causal for each in seen[1:]]
    asked = (np.asarray(batch.target_out) != PAD)[..., None, None]
    pairs = zip(jacobian, seen, strict=True)
    return largest(np.where(asked & ~allowed, moved, 0.0) for moved, allowed in pairs)


def padding_error(model: Model, params: Params, batch: Batch) -> float:
    """Returns how far the logits are from those of some pairs alone, without padding."""
    together, errors = logits_of(model, params, batch), [0.0]
    for row in range(0, len(together), 3):
        source, target = (np.sum(side[row] != PAD) for side in (batch.source, batch.target_out))
        if source and target:
            parts = (batch.source[:, :source], batch.target_in[:, :target])
            alone = Batch(*(part[row : row + 1] for part in (*parts, batch.target_out[:, :target])))
            logits = logits_of(model, params, alone)
            errors.append(relative_error(together[row : row + 1, :target], logits))
    return largest(errors)


def gradient(setup: StepSetup, params: Params, batch: Batch) -> tuple[Params, float]:
    """Returns the gradient of the summed loss of a step, and the sum, without dropout."""
    mesh, averages = setup.mesh, {n: jnp.zeros(()) for n in setup.abstract_state.averages}

    def step(params: Params, batch: Batch, reduce: Any = lambda tree: tree) -> Any:
        options = {"loss": setup.loss, "accumulate": setup.microbatches}
        return reduce(gradients(params, batch, None, averages, **options)[:2])

    run = setup.compile(step, state=params)
    computed, total = run(shard_tree(params, mesh), shard_batch(batch, mesh))
    return jax.tree.map(np.asarray, computed), float(total)


def step_error(one: StepSetup, other: StepSetup, params: Params, batch: Batch) -> float:
    """Returns how far the gradient and the loss of a step are from those of another."""
    params = jax.tree.map(np.asarray, params)
    (wanted, loss), (actual, total) = (gradient(each, params, batch) for each in (one, other))
    return largest([abs(total / loss - 1), *jax.tree.leaves(gradient_errors(actual, wanted))])
