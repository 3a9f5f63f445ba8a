"""Devices: the mesh, where arrays live, and compiling the pure steps. No other room knows of these.

A batch is split by rows over the one axis of the mesh, "data"; everything else is on every device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXIS = "data"


def make_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of one axis over `devices`; None: all there are."""
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh((len(devices),), (AXIS,), devices=devices, axis_types=(AxisType.Auto,))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """`tree` on every device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def put(batch: Any, mesh: Mesh) -> Any:
    """A batch on the mesh: its rows are this process's, and are split over its devices."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    return jax.tree.map(partial(jax.make_array_from_process_local_data, sharding), batch)


def compile(step: Callable[..., Any], mesh: Mesh, how: str = "jit", donate: bool = False) -> Any:
    """Compiles `step(state, batch, *rest, reduce=...)` to run over the mesh.

    `state` and `rest` are on every device, the batch is split by rows, and what the step returns is
    the same everywhere. By `jit` the arrays are global and `reduce` is the identity; by `pmap` each
    device sees its rows, and `reduce` sums over devices. `donate`: the state's memory is reused.
    """
    if how == "pmap":
        return _pmap(step, mesh, donate)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(step, out_shardings=everywhere, donate_argnums=(0,) if donate else ())


def cache_programs(folder: Path | None = None) -> None:
    """Keeps compiled programs between runs, in the user's cache folder unless `folder` is given.

    Never in a run: they are machine code.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(folder or home / "transformer_jax/programs"))


def _pmap(step: Callable[..., Any], mesh: Mesh, donate: bool) -> Callable[..., Any]:
    devices = list(mesh.devices.flat)

    def local(state: Any, batch: Any, keys: Any) -> Any:
        keys = [jax.random.fold_in(key, jax.lax.axis_index(AXIS)) for key in keys]
        return step(state, batch, *keys, reduce=partial(jax.lax.psum, axis_name=AXIS))

    mapped = jax.pmap(
        local,
        AXIS,
        in_axes=(None, 0, None),
        out_axes=None,
        devices=devices,
        donate_argnums=(0,) if donate else (),
    )

    def run(state: Any, batch: Any, *keys: jax.Array) -> Any:
        split = jax.tree.map(lambda x: x.reshape(len(devices), -1, *x.shape[1:]), batch)
        return replicate(mapped(state, split, keys), mesh)

    return run
