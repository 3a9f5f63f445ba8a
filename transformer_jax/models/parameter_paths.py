"""What the path of a parameter says about it: its dimensions, how a matmul uses them, and the part
of the model that it belongs to.

A path is a string such as "encoder/layers_0/ffn/in/kernel". But for the parts, only its end counts,
so that the paths of an optimizer's state, which hold those of the parameters, say the same. No
other module interprets the names of parameters.
"""

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import PurePosixPath
from typing import Any, Literal

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer_jax.config import did_you_mean
from transformer_jax.errors import UserError
from transformer_jax.types import Params

DIMENSIONS: dict[str, tuple[str, ...]] = {
    "*_embedding/embedding": ("vocabulary", "d_model"),
    "output": ("vocabulary", "d_model"),
    "output_bias": ("vocabulary",),
    "*_attention/query/kernel": ("d_model", "heads", "head_size"),
    "*_attention/key/kernel": ("d_model", "heads", "head_size"),
    "*_attention/value/kernel": ("d_model", "heads", "head_size"),
    "*_attention/out/kernel": ("heads", "head_size", "d_model"),
    "*_attention/forget/kernel": ("d_model", "state"),
    "*_attention/candidate/kernel": ("d_model", "state"),
    "ffn/in/kernel": ("d_model", "d_ff"),
    "ffn/gate/kernel": ("d_model", "d_ff"),
    "ffn/out/kernel": ("d_ff", "d_model"),
}
"""The logical names of the dimensions of parameters, by the end of their paths. A bias has those of
its layer's outputs. Parameters that are not listed are split over the axis "fsdp" only."""

PARTS = {
    "encoder": "encoder/*",
    "decoder": "decoder/*",
    "embeddings": "*_embedding/*",
    "norms": "*norm/*",
    "cross_attention": "*cross_attention/*",
}
"""Parts of a model by name, as patterns of paths, in which "*" also matches "/"."""


def by_path(params: Params) -> dict[str, Any]:
    """Returns the leaves by path."""
    return flatten_dict(params, sep="/")


def to_tree(leaves: Mapping[str, Any]) -> Params:
    """Returns the tree of leaves by path."""
    return unflatten_dict(dict(leaves), sep="/")


def merge(*parts: Params) -> Params:
    """Returns the tree of all leaves; of those of the same path, the last one."""
    return to_tree({path: leaf for part in parts for path, leaf in by_path(part).items()})


def split(params: Params, patterns: Iterable[str]) -> tuple[Params, Params]:
    """Returns the tree of the leaves that are in `patterns`, as in `select`, and that of the
    others."""
    leaves = by_path(params)
    inside = {path: leaf for path, leaf in leaves.items() if _is_in(path, patterns)}
    return to_tree(inside), to_tree({k: v for k, v in leaves.items() if k not in inside})


def restrict(params: Params, like: Params) -> Params:
    """Returns the tree of the leaves that `like` has, too."""
    leaves = by_path(params)
    return to_tree({path: leaves[path] for path in by_path(like)})


def select(patterns: Iterable[str], paths: Iterable[str], field: str) -> list[str]:
    """Returns the paths that match any of `patterns`: names of `PARTS`, or patterns of paths.

    UserError: one of them matches none, or together they match all; the message names `field`.
    """
    paths = list(paths)
    for pattern in patterns:
        if not any(_is_in(path, [pattern]) for path in paths):
            hint = did_you_mean(pattern, [*PARTS, "encoder/layers_0/*"])
            raise UserError(f"{field}={pattern!r}: matches no parameter{hint}")
    selected = [path for path in paths if _is_in(path, patterns)]
    if len(selected) == len(paths):
        raise UserError(f"{field}={' '.join(patterns)!r}: must not match every parameter")
    return selected


def _is_in(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(path, PARTS.get(pattern, pattern)) for pattern in patterns)


def vocabulary_side(path: str) -> Literal["source", "target"] | None:
    """Returns the side whose ids are the rows of a parameter; None: it has no row for each id."""
    if "vocabulary" not in dimension_names(path):
        return None
    return "source" if path.startswith("source_embedding/") else "target"


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
    if end.name == "bias":
        names = dimension_names(kernel := str(end.with_name("kernel")))
        return names[len(input_dimensions(kernel, len(names)) or ()) :]
    return next((names for pattern, names in DIMENSIONS.items() if end.match(pattern)), ())


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
