"""Plans training: the programs that it compiles and the memory that it needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from transformer_jax.data.loader import Shape
from transformer_jax.parallel.compile import compile_step
from transformer_jax.parallel.mesh import shard_batch
from transformer_jax.training.setup import Setup, empty_batch, init_fn, update_fn


class Program(NamedTuple):
    """A compiled training step."""

    shape: Shape
    temporary_bytes: int  # memory on each device besides the state and the batch


def programs(setup: Setup) -> Iterator[Program]:
    """Compiles and yields the training step of each batch shape."""
    step = compile_step(update_fn(setup), setup.mesh, donate=True)
    state = _abstract_state(setup)
    for shape in setup.loader.full_shapes():
        batch = shard_batch(empty_batch(shape, setup.config.data.packing), setup.mesh)
        compiled = step.lower(state, batch, jax.random.key(0)).compile()
        yield Program(shape, compiled.memory_analysis().temp_size_in_bytes)


def state_bytes(setup: Setup) -> int:
    """Returns the size of the training state, of which each device holds a copy."""
    leaves = jax.tree.leaves(_abstract_state(setup))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _abstract_state(setup: Setup) -> Any:
    """Returns the training state with shapes and types in place of arrays."""
    batch = empty_batch(setup.loader.full_shapes()[0])  # rows that the devices share evenly
    return jax.eval_shape(init_fn(setup), jax.random.key(0), batch)
