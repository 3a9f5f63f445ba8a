"""The costs of a step, counted from its jaxpr, are those of the program."""

from dataclasses import replace
from typing import Any

import jax
import pytest
from common import tiny, with_rare

from transformer_jax.config import AttentionConfig, Config, DataConfig, MeshConfig, ModelConfig
from transformer_jax.data.buckets import Shape
from transformer_jax.flops import count_flops
from transformer_jax.parallel.devices import find_accelerator
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.training.planning import StepCosts
from transformer_jax.training.setup import StepSetup, abstract_batch, prepare_step

SHAPES = (Shape(16, 24, 40), Shape(40, 64, 48))


def setup_of(model: ModelConfig, **changes: Any) -> StepSetup:
    config = replace(Config(model=model, **changes), mesh=MeshConfig(data=1))
    return prepare_step(config, (40, 40), make_mesh(config.mesh, jax.devices()[:1]))


MODELS = {
    "soft": tiny(max_length=64),
    "local-p": tiny(max_length=64, encoder_attention=AttentionConfig("local-p", window=3)),
    "latent": tiny(max_length=64, cross_attention=AttentionConfig("latent")),
    "local-p, packed": tiny(max_length=64, encoder_attention=AttentionConfig("local-p", window=3)),
    "hard": tiny(layers=2, max_length=64, cross_attention=AttentionConfig("hard", layer=1)),
    "ssru": tiny(max_length=64, self_layer="ssru"),
    "classifier": tiny(max_length=64, labels=50, tied="none"),
}
RARE = ("local-p", "latent", "local-p, packed", "hard", "ssru")
"""Tried by `make test-slow`."""


@pytest.mark.parametrize("name", with_rare(MODELS, RARE))
def test_operations_are_those_of_the_step_at_each_shape(name: str) -> None:
    packing = name in ("soft", "ssru", "local-p, packed")
    setup = setup_of(MODELS[name], data=DataConfig(packing=packing))
    alone = replace(setup, model=setup.model.clone(kernel="reference"))
    costs = StepCosts(setup)
    for shape in SHAPES if packing else SHAPES[:1]:
        arguments = setup.abstract_state, abstract_batch(shape, packing), jax.random.key(0)
        assert costs.flops(shape) == count_flops(alone.update, *arguments)


def test_operations_are_within_a_tenth_of_what_xla_counts() -> None:
    """XLA also counts the operations outside matmuls, and a loop's body once: there is no loop."""
    setup = setup_of(tiny(d_model=128, d_ff=512, max_length=64))
    shape = Shape(8, 24, 32)
    arguments = setup.abstract_state, abstract_batch(shape), jax.random.key(0)
    counted = jax.jit(setup.update).lower(*arguments).cost_analysis()
    assert counted is not None
    assert StepCosts(setup).flops(shape) == pytest.approx(counted["flops"], rel=0.1)


def test_rematerialization_keeps_less_and_computes_more() -> None:
    setup, shape = setup_of(tiny(max_length=64)), SHAPES[0]
    costs, policies = StepCosts(setup), ("none", "matmuls", "layers")
    none, matmuls, layers = (costs.flops(shape, remat) for remat in policies)
    assert none == matmuls < layers
    none, matmuls, layers = (costs.saved_bytes(shape, remat) for remat in policies)
    assert none > matmuls > layers


def test_accelerators_are_known_by_their_names() -> None:
    wanted = {
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA A100-SXM4-40GB": 312,
        "TPU v5 lite": 197,
        "TPU v5": 459,
        "cpu": None,
    }
    assert {kind: getattr(find_accelerator(kind), "tflops", None) for kind in wanted} == wanted
