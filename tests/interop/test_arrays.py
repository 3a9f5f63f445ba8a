"""Parameters from another framework's arrays are all used, or refused by name."""

import jax
import numpy as np
import pytest

from transformer_jax.errors import UserError
from transformer_jax.interop.arrays import params_from_arrays

LIKE = {
    "ffn": {"kernel": jax.ShapeDtypeStruct((2, 3), np.float32)},
    "heads": jax.ShapeDtypeStruct((2, 2), np.float32),
}


def theirs(ours: str) -> str:
    return ours.replace("/", ".").replace("kernel", "weight")


def test_arrays_become_parameters() -> None:
    arrays = {"ffn.weight": np.arange(6.0).reshape(2, 3), "heads": np.arange(4.0)}
    params = params_from_arrays(arrays, LIKE, theirs)
    np.testing.assert_array_equal(params["ffn"]["kernel"], [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(params["heads"], [[0, 1], [2, 3]])
    assert params["heads"].dtype == np.float32


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"heads": np.zeros(4)}, "ffn.weight: no such array; .* parameter ffn/kernel"),
        ({"ffn.weight": np.zeros(5)}, r"ffn.weight: has the shape \(5,\); must be \(2, 3\)"),
        ({"ffn.weight": np.zeros(6), "heads": np.zeros(4), "b": np.zeros(1)}, "uses: b"),
    ],
)
def test_what_does_not_fit_is_named(arrays: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(UserError, match=message):
        params_from_arrays(arrays, LIKE, theirs)
