"""Checks a config against the tables of what it names, builds its model, and counts parameters."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.attention.kernels import AnyKernel, check_kernel, find_kernel
from transformer_jax.attention.kinds import Kind, find_kind
from transformer_jax.attention.scores import SCORES
from transformer_jax.config import ROLES, AttentionConfig, ModelConfig, look_up
from transformer_jax.errors import UserError
from transformer_jax.models.classifier import Classifier
from transformer_jax.models.feed_forward import ACTIVATIONS
from transformer_jax.models.quantization import quantize
from transformer_jax.models.self_layers import find_self_layer
from transformer_jax.models.transformer import Model, Transformer
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
    # Dropout changes no shape, and takes a sixth of the time.
    config = replace(config, dropout=0.0, attention_dropout=0.0, ffn_dropout=0.0)
    model = make_model(config, source_vocabulary, target_vocabulary)
    ids: Any = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    key: Any = jax.eval_shape(jax.random.key, 0)
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


def check_model(config: ModelConfig, kernel: AnyKernel = "auto") -> None:
    """Checks that `config` is possible, and that the kernel can compute its attentions.

    UserError: a check fails; the message names the field, its value and what would be right.
    """
    look_up(ACTIVATIONS, config.activation, "model.activation")
    for role in ROLES:
        _check_attention(config, role, find_kind(role, getattr(config, role).kind))
    _check_self_layer(config)
    _check_kernel(config, kernel)


def check_packing(config: ModelConfig) -> None:
    """Checks that the model can be trained on packed rows. UserError: it cannot."""
    refused = "data.packing=True: must be false where model."
    if config.labels is not None:
        raise UserError(f"{refused}labels={config.labels}: a classifier's targets are not packed")
    layer = config.self_layer
    if not find_self_layer(layer).packing:
        raise UserError(f"{refused}self_layer={layer!r}, which does not support it")
    for role in ROLES:
        kind = getattr(config, role).kind
        if not find_kind(role, kind).packing:
            reason = "whose reward assumes one sentence per row"
            raise UserError(f"{refused}{role}.kind={kind!r}, {reason}")


def _check_attention(config: ModelConfig, role: str, kind: Kind) -> None:
    attention, depth = getattr(config, role), config.depth_of(role)
    look_up(SCORES, attention.score, f"model.{role}.score")

    def require(ok: bool, name: str, want: str) -> None:
        config.require(ok, f"{role}.{name}", want)

    is_label = role == "cross_attention" and config.labels is not None
    reason = kind.excluded.get("label_attention" if is_label else role)
    require(reason is None, "kind", f"another kind, since {reason}")
    label, has_window = attention.kind, attention.window is not None
    require(kind.window != "required" or has_window, "window", f"at least 1 for the kind {label}")
    require(kind.window != "none" or not has_window, "window", f"left out for the kind {label}")
    require(kind.score or attention.score == "scaled_dot", "score", f"left out for {label}")
    one = attention.layer is not None or not kind.one_layer
    require(one, "layer", f"named (0 to {depth - 1}) for {label}")
    fits = kind.projections or config.positions != "rotary"
    config.require(fits, "positions", f"other than rotary with attention of kind {label}")
    fits = not config.attention_dropout or (kind.dropout and SCORES[attention.score].product)
    what = f"score {attention.score}" if kind.dropout else f"kind {label}"
    config.require(fits, "attention_dropout", f"0 with attention of {what}")


def _check_self_layer(config: ModelConfig) -> None:
    """Raises UserError for what the decoder's self-layer does not support."""
    entry, plain = find_self_layer(config.self_layer), AttentionConfig()
    required = {
        "positions": (config.positions in entry.positions, " or ".join(entry.positions)),
        "attention_dropout": (entry.dropout or config.attention_dropout == 0, "0"),
        "decoder_attention": (entry.attention or config.decoder_attention == plain, "left out"),
    }
    for name, (ok, want) in required.items():
        config.require(ok, name, f"{want} with model.self_layer={config.self_layer!r}")


def _check_kernel(config: ModelConfig, kernel: AnyKernel) -> None:
    """Raises UserError for an unknown kernel, or one that lacks what the model needs."""
    if not isinstance(kernel, str) or kernel == "auto":
        return
    needs: dict[str, str] = {}
    if config.positions in ("alibi", "relative"):
        needs["bias"] = f"model.positions={config.positions!r}"
    if config.attention_dropout:
        needs["dropout"] = f"model.attention_dropout={config.attention_dropout}"
    for role in ROLES:
        label = getattr(config, role).kind
        for feature in find_kind(role, label).kernel_features:
            needs[feature] = f"model.{role}.kind={label!r}"
    check_kernel(find_kernel(kernel), needs, config.dtype, "execution.kernel")
