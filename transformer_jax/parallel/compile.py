"""Compiles pure functions to run over a mesh, with `jit` or, for training steps, with `pmap`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.parallel.mesh import DATA, replicate
from transformer_jax.parallel.parameters import partition_tree

REPLICATED = PartitionSpec()

KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
"""Options for XLA's CPU compiler, which otherwise removes the barriers of `jax.checkpoint`, finds
that values are computed twice, and keeps them in memory."""

DETERMINISTIC = {"xla_gpu_deterministic_ops": "True"}
"""Options for XLA's GPU compiler with which a program computes the same bits each time that it is
compiled and run. Other compilers accept and ignore them."""


def compile_function(
    function: Callable[..., Any],
    mesh: Mesh,
    *,
    result: Any = REPLICATED,
    donate: tuple[int, ...] = (),
    options: dict[str, str] | None = None,
) -> Any:
    """Returns `function`, compiled with `jit` to run over the mesh on global arrays.

    result: a tree of `PartitionSpec`s for the result, or a prefix of one; None: what the compiler
    chooses. donate: indices of the arguments whose memory is reused. options: XLA's, for this
    function.
    """
    placed = jax.tree.map(partial(NamedSharding, mesh), result)
    return jax.jit(function, out_shardings=placed, donate_argnums=donate, compiler_options=options)


def compile_step(
    step: Callable[..., Any],
    mesh: Mesh,
    state: Any = None,
    *,
    result: Any = REPLICATED,
    executor: str = "jit",
    deterministic: bool = False,
) -> Any:
    """Returns `step(state, batch, *keys, reduce=...)`, compiled to run over the mesh.

    state: what a training step updates, or its shapes: the step returns a pair whose first part is
    the new state, split over the mesh by `partition_tree`, in the memory of the old one. None: the
    result is split as `result` says, with `jit`, and the arguments are kept.

    With `jit`, the arrays are global and have any sharding, and `reduce` is the identity. With
    `pmap`, everything but the batch is replicated, each device sees its own rows, and `reduce` sums
    over devices. deterministic: with `jit`, as in `ExecutionConfig`.
    """
    donate = () if state is None else (0,)
    if executor == "pmap":
        return _pmap(step, mesh, donate)
    if state is not None:
        result = (partition_tree(state, mesh), REPLICATED)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    options = (KEEP_BARRIERS if on_cpu else {}) | (DETERMINISTIC if deterministic else {})
    return compile_function(step, mesh, result=result, donate=donate, options=options)


def _pmap(step: Callable[..., Any], mesh: Mesh, donate: tuple[int, ...]) -> Callable[..., Any]:
    devices = list(mesh.devices.flat)

    def local(state: Any, batch: Any, keys: Any) -> Any:
        keys = [jax.random.fold_in(key, jax.lax.axis_index(DATA)) for key in keys]
        return step(state, batch, *keys, reduce=partial(jax.lax.psum, axis_name=DATA))

    mapped = jax.pmap(
        local, DATA, in_axes=(None, 0, None), out_axes=None, devices=devices, donate_argnums=donate
    )

    def run(state: Any, batch: Any, *keys: jax.Array) -> Any:
        split = jax.tree.map(lambda x: x.reshape(mesh.size, -1, *x.shape[1:]), batch)
        return replicate(mapped(state, split, keys), mesh)

    return run
