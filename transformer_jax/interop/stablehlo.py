"""Writes a trained model as StableHLO programs (`jax.export`) for any batch and length.

A folder holds three programs, each as `NAME.jax` for `jax.export.deserialize` and as `NAME.mlir`,
StableHLO's portable bytecode. Their first arguments are the arrays of `params.npz` in its order.

    encode  (params..., source [B, S]) -> state...
    step    (params..., ids [B, 1], index, state...) -> logits [B, V], state...
    greedy  (params..., source [B, S]) -> ids [B, T]
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from transformer_jax.decoding.strategies import Lines, greatest_length, make_search
from transformer_jax.interop.snippets import add_snippet
from transformer_jax.models.make import make_model
from transformer_jax.models.parameter_paths import by_path
from transformer_jax.runs.run import Run
from transformer_jax.types import Params

PLATFORMS = ("cpu", "cuda", "tpu")


def export(run: Run, step: int, params: Params, folder: Path) -> None:
    """Writes the programs of a model to `folder`, which must not exist.

    The search is greedy, with the limits of the run's.
    """
    model = make_model(run.config.model, *run.tokenizers.sizes, kernel="reference")
    decode = replace(run.config.decode, beam=1, n_best=1, sample=False)
    suppressed = [run.tokenizers.target.find(piece) for piece in decode.suppress]
    # Exported programs take and return flat lists, which need no Python types of this package. The
    # structure of the state is known once `encode` has been traced.
    leaves, tree = jax.tree.flatten(params)
    structure: Any = None

    def encode(leaves: Sequence[Any], source: Any) -> list[Any]:
        nonlocal structure
        variables = {"params": jax.tree.unflatten(tree, leaves)}
        longest = greatest_length([model], decode, source.shape[1])
        state = model.apply(variables, source, 1, longest, method="prefill")
        arrays, structure = jax.tree.flatten(state)
        return arrays

    def decode_step(leaves: Sequence[Any], ids: Any, index: Any, state: Sequence[Any]) -> Any:
        variables = {"params": jax.tree.unflatten(tree, leaves)}
        output: Any = model.apply(
            variables, ids, jax.tree.unflatten(structure, state), index, method="decode_step"
        )
        return output[0][:, 0], jax.tree.leaves(output[1])

    def greedy(leaves: Sequence[Any], source: Any) -> Any:
        search = make_search([model], decode, suppressed)
        return search([jax.tree.unflatten(tree, leaves)], Lines(source)).ids[:, 0]

    # Symbolic sizes make one program serve any number of sentences of any length.
    rows, width = jax_export.symbolic_shape("rows, width")
    source = jax.ShapeDtypeStruct((rows, width), jnp.int32)
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    state = jax.eval_shape(encode, shapes, source)
    last, index = jax.ShapeDtypeStruct((rows, 1), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    programs = {
        "encode": (encode, shapes, source),
        "step": (decode_step, shapes, last, index, state),
        "greedy": (greedy, shapes, source),
    }
    folder.mkdir(parents=True)
    for name, (function, *arguments) in programs.items():
        exported = jax_export.export(jax.jit(function), platforms=PLATFORMS)(*arguments)
        (folder / f"{name}.jax").write_bytes(exported.serialize())
        (folder / f"{name}.mlir").write_bytes(exported.mlir_module_serialized)
    np.savez(folder / "params.npz", allow_pickle=False, **by_path(params))
    add_snippet("stablehlo.py", folder, "translate.py", run.tokenizers)
