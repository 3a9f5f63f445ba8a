"""Builds the model that a config describes, and counts its parameters."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.attention import AnyKernel
from transformer_jax.config import ModelConfig
from transformer_jax.models.checks import check_model
from transformer_jax.models.classifier import Classifier
from transformer_jax.models.quantization import quantize
from transformer_jax.models.transformer import Model, Transformer
from transformer_jax.special_ids import PAD
from transformer_jax.types import Batch, Constrain, ModelOutput, Params, unconstrained


def make_model(
    config: ModelConfig,
    source_vocabulary: int,
    target_vocabulary: int,
    kernel: AnyKernel = "auto",
    constrain: Constrain = unconstrained,
    remat: str = "none",
    shards: int = 1,
) -> Model:
    """Returns the model that `config`, which `check_model` has accepted, describes: a `Classifier`
    if it has labels.

    remat: as in `ExecutionConfig`. shards: as in `Model`.
    """
    model = Transformer if config.labels is None else Classifier
    return model(config, source_vocabulary, target_vocabulary, kernel, constrain, remat, shards)


@cache
def abstract_model(
    config: ModelConfig, source_vocabulary: int, target_vocabulary: int
) -> tuple[ModelOutput, Params]:
    """Returns the output for one token and the parameters of the model that `config` describes,
    with shapes and types in place of arrays."""
    model = make_model(config, source_vocabulary, target_vocabulary)
    ids, key = jnp.full((1, 1), PAD, jnp.int32), jax.random.key(0)
    shapes: Any = jax.eval_shape(model.init_with_output, key, Batch(ids, ids, ids), key)
    output, variables = shapes
    return output, variables["params"]


def abstract_params(config: ModelConfig, source_vocabulary: int, target_vocabulary: int) -> Params:
    """Returns the tree of the stored parameters, with shapes and types in place of arrays.

    UserError: as `check_model`; the config may be that of a run which is loaded.
    """
    check_model(config)
    params = abstract_model(config, source_vocabulary, target_vocabulary)[1]
    return jax.eval_shape(quantize, params) if config.weights == "int8" else params


def count_parameters(config: ModelConfig, source_vocabulary: int, target_vocabulary: int) -> int:
    """Returns the number of parameters of the model that `config` describes."""
    tree = abstract_model(config, source_vocabulary, target_vocabulary)[1]
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
