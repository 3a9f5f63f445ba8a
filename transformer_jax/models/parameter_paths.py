"""What the path of a parameter says about it: its dimensions, and how a matmul uses them.

A path is a string such as "encoder/layers_0/ffn/in/kernel". Only its end counts, so that the paths
of an optimizer's state, which hold those of the parameters, say the same. No other module
interprets the names of parameters.
"""

from collections.abc import Callable
from functools import cache
from pathlib import PurePosixPath
from typing import Any

import jax

DIMENSIONS: dict[str, tuple[str, ...]] = {
    "*_embedding/embedding": ("vocabulary", "d_model"),
    "output": ("vocabulary", "d_model"),
    "output_bias": ("vocabulary",),
    "*_attention/query/kernel": ("d_model", "heads", "head_size"),
    "*_attention/query/bias": ("heads", "head_size"),
    "*_attention/key/kernel": ("d_model", "heads", "head_size"),
    "*_attention/key/bias": ("heads", "head_size"),
    "*_attention/value/kernel": ("d_model", "heads", "head_size"),
    "*_attention/value/bias": ("heads", "head_size"),
    "*_attention/out/kernel": ("heads", "head_size", "d_model"),
    "*_attention/forget/kernel": ("d_model", "state"),
    "*_attention/forget/bias": ("state",),
    "*_attention/candidate/kernel": ("d_model", "state"),
    "ffn/in/kernel": ("d_model", "d_ff"),
    "ffn/in/bias": ("d_ff",),
    "ffn/gate/kernel": ("d_model", "d_ff"),
    "ffn/gate/bias": ("d_ff",),
    "ffn/out/kernel": ("d_ff", "d_model"),
}
"""The logical names of the dimensions of parameters, by the end of their paths. Parameters that are
not listed are split over the axis "fsdp" only."""


def map_with_paths(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """Returns the tree with `function(path, leaf)` in place of each leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: function(jax.tree_util.keystr(path, simple=True, separator="/"), leaf),
        tree,
    )


@cache
def dimension_names(path: str) -> tuple[str, ...]:
    """Returns the logical names of a parameter's dimensions; none if it is not in `DIMENSIONS`."""
    end = PurePosixPath(path)
    return next((names for pattern, names in DIMENSIONS.items() if end.match(pattern)), ())


def has_target_rows(path: str) -> bool:
    """Returns whether a parameter has a row for each target id, by which logits are computed."""
    return path in ("target_embedding/embedding", "output", "output_bias")


def is_matrix(path: str) -> bool:
    """Returns whether a parameter is a weight matrix, not a bias (even of heads) or a scale."""
    return path.rpartition("/")[2] not in ("bias", "scale", "output_bias")


def is_dense(path: str) -> bool:
    """Returns whether a parameter is the matrix of a dense layer."""
    return path.rpartition("/")[2] == "kernel"


def input_dimensions(path: str, rank: int) -> tuple[int, ...] | None:
    """Returns the dimensions that a matmul with the parameter sums over; None: there is no matmul.

    rank: the number of its dimensions.
    """
    *_, layer, name = ["", *path.split("/")]
    if name == "kernel":
        # The output projection of attention is [N, H, D], the other three are [D, N, H].
        return tuple(range(rank - 1)) if layer == "out" else (0,)
    return (1,) if name in ("embedding", "output") else None
