"""Converts named arrays, such as the state dictionary of another framework, to parameters."""

from collections.abc import Callable, Mapping
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.models.parameter_paths import map_with_paths
from transformer_jax.types import Params


def params_from_arrays(
    arrays: Mapping[str, np.ndarray], like: Params, their_name: Callable[[str], str]
) -> Params:
    """Returns `arrays` as parameters with the structure, shapes and types of `like`.

    their_name: maps the name of a parameter, such as "encoder/layers_0/ffn/in/kernel", to its name
    in `arrays`. An array may have one dimension in place of several, since heads are a dimension of
    their own here. UserError: an array is missing, of another shape, or used by no parameter.
    """
    unused = set(arrays)

    def leaf(ours: str, wanted: Any) -> np.ndarray:
        theirs = their_name(ours)
        if theirs not in arrays:
            raise UserError(f"{theirs}: no such array; it should hold the parameter {ours}")
        unused.discard(theirs)
        array = np.asarray(arrays[theirs])
        sizes = {1, *accumulate(wanted.shape, mul)}  # those of the first dimensions
        if array.size != wanted.size or not sizes.issuperset(accumulate(array.shape, mul)):
            raise UserError(
                f"{theirs}: has the shape {array.shape}; must be {wanted.shape} for {ours}"
            )
        return array.reshape(wanted.shape).astype(wanted.dtype)

    params = map_with_paths(leaf, like)
    if unused:
        raise UserError(f"arrays that no parameter uses: {', '.join(sorted(unused))}")
    return params
