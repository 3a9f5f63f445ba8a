"""Writes a trained model in CTranslate2's format (OpenNMT's C++ inference engine)."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.attention.positions import FURTHEST, position_table
from transformer_jax.config import Config, ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.interop.fields import require_fields
from transformer_jax.interop.snippets import add_snippet
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import BOS, EOS, PAD, UNK
from transformer_jax.types import Params

ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "quick_gelu": "GELUSigmoid",
    "silu": "SWISH",
    "swiglu": "SWISH",
}
"""CTranslate2's names of activations."""


def check(config: ModelConfig) -> None:
    """Checks each field of the model. UserError: CTranslate2 has nothing like it.

    It has ALiBi in decoders only.
    """
    supported = {
        "labels": (None,),
        "self_layer": ("attention",),
        "positions": ("sinusoidal", "learned", "rotary", "relative", "none"),
        "activation": tuple(ACTIVATIONS),
    }
    require_fields(config, "CTranslate2", supported)


def export(run: Run, step: int, params: Params, folder: Path) -> None:
    """Writes the model to `folder`, which must not exist, with a program that translates with it.

    Sources are given without the end symbol, as the pieces of the run's tokenizer. UserError:
    CTranslate2 is not installed, or cannot express the model.
    """
    config = run.config.model
    check(config)
    spec = _empty_spec(config)
    # Both sides are filled in alike: the embedding, each layer and, with pre-norm, the final norm.
    target = params["target_embedding"]
    source = target if config.tied == "all" else params["source_embedding"]
    for part, table, embedding, tree in (
        (spec.encoder, spec.encoder.embeddings[0], source, params["encoder"]),
        (spec.decoder, spec.decoder.embeddings, target, params["decoder"]),
    ):
        _fill_embedding(part, table, embedding, config)
        for i, layer in enumerate(part.layer):
            _fill_layer(layer, tree[f"layers_{i}"])
            if config.positions == "relative":  # which all layers of a stack share
                attention = layer.self_attention
                attention.relative_attention_bias = _array(tree["bias"]["table"])
                attention.relative_attention_max_distance = np.int32(FURTHEST)
        if config.norm == "pre":
            _fill_norm(part.layer_norm, tree["norm"])
    output = spec.decoder.projection
    output.weight = _array(params["output"] if config.tied == "none" else target["embedding"])
    if config.output_bias:
        output.bias = _array(params["output_bias"])
    sources, names = (side.pieces(range(side.size)) for side in run.tokenizers)
    spec.register_source_vocabulary(sources)
    spec.register_target_vocabulary(names)
    # Without these, CTranslate2 would take the special symbols of OpenNMT.
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = config.norm_eps
    spec.config.bos_token, spec.config.eos_token = names[BOS], names[EOS]
    spec.config.unk_token = names[UNK]
    spec.config.decoder_start_token = names[config.start_id]
    spec.decoder.start_from_zero_embedding = config.decoder_start_id is None
    spec.validate()
    spec.optimize(quantization="float32")
    folder.mkdir(parents=True)
    spec.save(str(folder))
    add_snippet("ctranslate2.py", folder, "translate.py", run.tokenizers)
    search = _search_options(run.config, names[PAD])
    (folder / "search.json").write_text(json.dumps(search, indent=1), "utf-8")


def _empty_spec(config: ModelConfig) -> Any:
    """Returns CTranslate2's description of the model. UserError: it is not installed."""
    try:
        from ctranslate2.specs import common_spec, transformer_spec
    except ImportError as error:
        raise UserError("ctranslate2: is not installed; pip install ctranslate2") from error
    options: dict[str, Any] = {
        "num_heads": config.heads,
        "num_heads_kv": config.kv_heads,
        "pre_norm": config.norm == "pre",
        "activation": getattr(common_spec.Activation, ACTIVATIONS[config.activation]),
        "ffn_glu": config.activation == "swiglu",
        "relative_attention_bias": config.positions == "relative",
        "rotary_dim": 0 if config.positions == "rotary" else None,  # 0: all columns of a head
    }
    encoder, decoder = config.depths
    return transformer_spec.TransformerSpec(
        transformer_spec.TransformerEncoderSpec(encoder, **options),
        transformer_spec.TransformerDecoderSpec(decoder, **options),
    )


def _search_options(config: Config, padding: str) -> dict[str, Any]:
    """Returns the search of the config, as far as CTranslate2 has it, for translate.py."""
    decode, longest = config.decode, config.model.max_length
    return {
        "beam_size": decode.beam,
        "length_penalty": decode.alpha if decode.penalty in ("gnmt", "power") else 0.0,
        "repetition_penalty": decode.repetition_penalty,
        "no_repeat_ngram_size": decode.no_repeat_ngrams or 0,
        "min_decoding_length": decode.min_length,
        "suppress_sequences": [[piece] for piece in (padding, *decode.suppress)],
        "max_ratio": decode.max_ratio,
        "max_length": min(decode.max_length or longest, longest),
    }


def _fill_embedding(part: Any, table: Any, params: Params, config: ModelConfig) -> None:
    table.weight = _array(params["embedding"])
    scale = config.d_model**0.5 if config.embedding_scale is None else config.embedding_scale
    part.scale_embeddings = np.float32(scale)
    if config.positions == "learned":
        part.position_encodings.encodings = _array(params["positions"])
    elif config.positions == "sinusoidal":
        part.position_encodings.encodings = _array(position_table(config))
    elif config.positions == "none":  # without a table, CTranslate2 would add its own sinusoids
        shape = config.max_length, config.d_model
        part.position_encodings.encodings = np.zeros(shape, np.float32)


def _fill_layer(spec: Any, params: Params) -> None:
    _fill_attention(spec.self_attention, params["self_attention"], fused=3)
    _fill_norm(spec.self_attention.layer_norm, params["self_attention_norm"])
    if "cross_attention" in params:
        _fill_attention(spec.attention, params["cross_attention"], fused=1)
        _fill_norm(spec.attention.layer_norm, params["cross_attention_norm"])
    network = params["ffn"]
    _fill_linear(spec.ffn.linear_0, network.get("gate", network["in"]))
    if "gate" in network:
        _fill_linear(spec.ffn.linear_0_noact, network["in"])
    _fill_linear(spec.ffn.linear_1, network["out"])
    _fill_norm(spec.ffn.layer_norm, params["ffn_norm"])


def _fill_attention(spec: Any, params: Params, *, fused: int) -> None:
    """Fills in the projections, the first `fused` of query, key and value in one matrix."""
    layers = [params[name] for name in ("query", "key", "value")]
    _fill_linear(spec.linear[0], *layers[:fused])
    if layers[fused:]:
        _fill_linear(spec.linear[1], *layers[fused:])
    _fill_linear(spec.linear[-1], params["out"], inputs=2)


def _fill_linear(spec: Any, *layers: Params, inputs: int = 1) -> None:
    """Fills in dense layers in one matrix. inputs: number of dimensions that kernels sum over."""
    kernels = [_array(layer["kernel"]) for layer in layers]
    spec.weight = np.concatenate([k.reshape(math.prod(k.shape[:inputs]), -1).T for k in kernels])
    if "bias" in layers[0]:
        spec.bias = np.concatenate([_array(layer["bias"]).ravel() for layer in layers])


def _fill_norm(spec: Any, params: Params) -> None:
    spec.gamma, spec.beta = _array(params["scale"]), _array(params["bias"])


def _array(leaf: Any) -> np.ndarray:
    return np.asarray(leaf, np.float32)
