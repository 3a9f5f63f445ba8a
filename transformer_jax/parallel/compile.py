"""Compiles pure functions to run over a mesh, with `jit` or, for training steps, with `pmap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.parallel.mesh import DATA, data_parallel_size, replicate

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
    arguments: Sequence[Any] | None = None,
    result: Any = REPLICATED,
    donate: tuple[int, ...] = (),
    options: dict[str, str] | None = None,
) -> Any:
    """Returns `function`, compiled with `jit` to run over the mesh on global arrays.

    arguments: for each argument a tree of `PartitionSpec`s, or a prefix of one; None: the shardings
    that the arguments have. result: the same for the result; None: what the compiler chooses.
    donate: indices of the arguments whose memory is reused. options: XLA's, for this function.
    """

    def placed(specs: Any) -> Any:
        return jax.tree.map(partial(NamedSharding, mesh), specs, is_leaf=_is_spec)

    compiled = partial(
        jax.jit,
        function,
        out_shardings=placed(result),
        donate_argnums=donate,
        compiler_options=options,
    )
    if arguments is None:
        return compiled()
    return compiled(in_shardings=tuple(map(placed, arguments)))


def compile_step(
    step: Callable[..., Any],
    mesh: Mesh,
    executor: str = "jit",
    *,
    result: Any = REPLICATED,
    donate: bool = False,
    deterministic: bool = False,
) -> Any:
    """Returns `step(state, batch, *keys, reduce=...)`, compiled to run over the mesh.

    With `jit`, the arrays are global and have any sharding, `reduce` is the identity, and the
    result is split as the `PartitionSpec`s of `result` say. With `pmap`, state, keys and result are
    replicated, each device sees its own rows of the batch, and `reduce` sums over devices. donate:
    whether the memory of the state is reused. deterministic: with `jit`, as in `ExecutionConfig`.
    """
    if executor == "pmap":
        return _pmap(step, mesh, donate)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    options = (KEEP_BARRIERS if on_cpu else {}) | (DETERMINISTIC if deterministic else {})
    return compile_function(
        step, mesh, result=result, donate=(0,) if donate else (), options=options
    )


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def _pmap(step: Callable[..., Any], mesh: Mesh, donate: bool) -> Callable[..., Any]:
    devices = list(mesh.devices.flat)

    def local(state: Any, batch: Any, keys: Any) -> Any:
        keys = [jax.random.fold_in(key, jax.lax.axis_index(DATA)) for key in keys]
        return step(state, batch, *keys, reduce=partial(jax.lax.psum, axis_name=DATA))

    mapped = jax.pmap(
        local,
        DATA,
        in_axes=(None, 0, None),
        out_axes=None,
        devices=devices,
        donate_argnums=(0,) if donate else (),
    )

    def run(state: Any, batch: Any, *keys: jax.Array) -> Any:
        rows = data_parallel_size(mesh)
        split = jax.tree.map(lambda x: x.reshape(rows, -1, *x.shape[1:]), batch)
        return replicate(mapped(state, split, keys), mesh)

    return run
