"""Plans training: the programs that it compiles and the memory that it needs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax

from transformer_jax.data.loader import Shape
from transformer_jax.parallel.compile import REPLICATED, compile_step
from transformer_jax.parallel.mesh import shard_batch
from transformer_jax.parallel.parameters import partition_tree
from transformer_jax.training.setup import Setup, empty_batch, update_fn


class Program(NamedTuple):
    """A compiled training step."""

    shape: Shape
    temporary_bytes: int  # memory on each device besides the state and the batch


def programs(setup: Setup) -> Iterator[Program]:
    """Compiles and yields the training step of each batch shape."""
    state = setup.abstract_state
    result = (partition_tree(state, setup.mesh), REPLICATED)
    step = compile_step(update_fn(setup), setup.mesh, result=result, donate=True)
    for shape in setup.loader.full_shapes():
        batch = shard_batch(empty_batch(shape, setup.config.data.packing), setup.mesh)
        compiled = step.lower(state, batch, jax.random.key(0)).compile()
        yield Program(shape, compiled.memory_analysis().temp_size_in_bytes)


def state_bytes(setup: Setup) -> int:
    """Returns the size of the training state on each device."""
    leaves = jax.tree.leaves(setup.abstract_state)
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves
    )
