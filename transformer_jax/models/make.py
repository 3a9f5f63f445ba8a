"""Builds the model that a config describes, and counts its parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer_jax.attention import Kernel
from transformer_jax.config import ModelConfig
from transformer_jax.models.base import Model
from transformer_jax.models.checks import check_model
from transformer_jax.models.classifier import Classifier
from transformer_jax.models.transformer import Transformer
from transformer_jax.special_ids import PAD
from transformer_jax.types import Batch, Constrain, Params, unconstrained


def make_model(
    config: ModelConfig,
    source_vocabulary: int,
    target_vocabulary: int,
    kernel: str | Kernel = "auto",
    constrain: Constrain = unconstrained,
    remat: str = "none",
    shards: int = 1,
) -> Model:
    """Returns the model that `config` describes: a `Classifier` if it has labels.

    remat: as in `ExecutionConfig`. shards: as in `Model`.

    UserError: a kind, score or kernel is unknown, or does not support what the config needs.
    """
    check_model(config, kernel)
    model = Transformer if config.labels is None else Classifier
    return model(config, source_vocabulary, target_vocabulary, kernel, constrain, remat, shards)


def abstract_params(model: Model) -> Params:
    """Returns the tree of the model's parameters, with shapes and types in place of arrays."""
    ids = jnp.full((1, 1), PAD, jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), Batch(ids, ids, ids))["params"]


def count_parameters(config: ModelConfig, source_vocabulary: int, target_vocabulary: int) -> int:
    """Returns the number of parameters of the model that `config` describes."""
    tree = abstract_params(make_model(config, source_vocabulary, target_vocabulary))
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
