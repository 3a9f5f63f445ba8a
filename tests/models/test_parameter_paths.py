"""What the paths of parameters say is true of the parameters of a model."""

import jax
import pytest
from common import build, flat, tiny

from transformer_jax.models.parameter_paths import (
    dimension_names,
    input_dimensions,
    is_dense,
    is_matrix,
    map_with_paths,
)

SIZES = {"d_model": 16, "heads": 4, "head_size": 4, "d_ff": 32, "vocabulary": 12}


def test_names_of_dimensions_fit_the_shapes() -> None:
    """Also of a state that holds parameters, whose paths are longer."""
    config = tiny(heads=4, d_ff=32, tied="none", activation="swiglu", output_bias=True)
    _, params = build(config, 12, 12)
    unnamed = {"scale", "bias"}
    for path, leaf in flat(params).items():
        names = dimension_names(path)
        assert tuple(SIZES[name] for name in names) == (leaf.shape if names else ()), path
        assert names or path.rpartition("/")[2] in unnamed, path
        assert dimension_names(f"opt_state/0/mu/{path}") == names


@pytest.mark.parametrize(
    ("path", "rank", "inputs", "dense"),
    [
        ("encoder/layers_0/self_attention/query/kernel", 3, (0,), True),
        ("encoder/layers_0/self_attention/out/kernel", 3, (0, 1), True),
        ("encoder/layers_0/ffn/out/kernel", 2, (0,), True),
        ("out/kernel", 2, (0,), True),
        ("source_embedding/embedding", 2, (1,), False),
        ("output", 2, (1,), False),
        ("source_embedding/positions", 2, None, False),
    ],
)
def test_matmuls_sum_over_the_inputs(
    path: str, rank: int, inputs: tuple[int, ...] | None, dense: bool
) -> None:
    assert input_dimensions(path, rank) == inputs
    assert (is_dense(path), is_matrix(path)) == (dense, True)


def test_vectors_are_no_matrices() -> None:
    for path in ("a/query/bias", "a/out/bias", "norm/scale", "output_bias"):
        assert (is_matrix(path), is_dense(path), input_dimensions(path, 1)) == (False, False, None)


def test_paths_are_those_of_the_tree() -> None:
    tree = {"a": {"b": 1}, "c": [2, jax.numpy.ones(1)]}
    paths = map_with_paths(lambda path, _: path, tree)
    assert paths == {"a": {"b": "a/b"}, "c": ["c/0", "c/1"]}
