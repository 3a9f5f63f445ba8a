"""Quantized parameters: as small and as close as 8 bits allow."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import build, tiny

from transformer_jax.config import TINY
from transformer_jax.models.make import abstract_params
from transformer_jax.models.quantization import Quantized, dequantize, quantize


@pytest.mark.usefixtures("strict")
def test_each_value_is_off_by_at_most_half_a_step_of_its_channel() -> None:
    _, params = build(tiny(), 400, 400)
    whole = quantize(params)
    abstract = abstract_params(tiny(weights="int8"), 400, 400)
    assert jax.tree.map(jnp.shape, whole) == jax.tree.map(jnp.shape, abstract)
    restored = jax.jit(dequantize)(whole)
    assert jax.tree.map(jnp.shape, restored) == jax.tree.map(jnp.shape, params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(restored)} == {"float32"}
    rows = whole["target_embedding"]["embedding"]
    assert isinstance(rows, Quantized)
    assert rows.scales.shape == (400, 1)
    layer, rounded = params["decoder"]["layers_0"], whole["decoder"]["layers_0"]
    for name, shape in (("query", (1, 2, 8)), ("out", (1, 1, 16))):
        array = layer["self_attention"][name]["kernel"]
        kernel = rounded["self_attention"][name]["kernel"]
        assert kernel.scales.shape == shape
        assert kernel.values.dtype == jnp.int8
        inputs = tuple(i for i, size in enumerate(shape) if size == 1)
        largest = np.max(np.abs(array), axis=inputs, keepdims=True)
        error = np.abs(np.float32(kernel.values) * kernel.scales - array)
        assert np.all(error <= 0.5 * largest / 127 * (1 + 1e-5))
        np.testing.assert_array_equal(np.max(np.abs(kernel.values), axis=inputs), 127)
    assert rounded["self_attention"]["query"]["bias"] is layer["self_attention"]["query"]["bias"]


def test_rows_of_zeros_stay_zeros() -> None:
    restored = dequantize(quantize({"x_embedding": {"embedding": jnp.zeros((3, 2))}}))
    np.testing.assert_array_equal(restored["x_embedding"]["embedding"], 0)


@pytest.mark.parametrize("layer", ["attention", "ssru"])
def test_all_but_a_few_bytes_are_of_matrices(layer: str) -> None:
    def size(weights: str) -> int:
        tree = abstract_params(replace(TINY, weights=weights, self_layer=layer), 4000, 4000)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    assert size("int8") <= 0.3 * size("float32")
