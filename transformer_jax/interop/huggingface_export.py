"""Writes a trained model as a MarianMT model of Hugging Face's transformers."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.interop.fields import require_fields
from transformer_jax.interop.huggingface import ACTIVATIONS, BIAS, NORM_EPS, WEIGHTS, their_name
from transformer_jax.interop.imported import NEVER
from transformer_jax.interop.snippets import add_snippet
from transformer_jax.interop.vocabulary import LANGUAGE
from transformer_jax.models import parameter_paths as paths
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import BOS, EOS, PAD, UNK
from transformer_jax.text.tokenizer import Tokenizer, Tokenizers
from transformer_jax.types import Params


def check(config: ModelConfig) -> None:
    """Checks each field of the model. UserError: MarianMT has nothing like it."""
    supported = {
        "labels": (None,),
        "self_layer": ("attention",),
        "norm": ("post",),
        "norm_eps": (1e-6, NORM_EPS),  # the variances of sums are so large that both are the same
        "kv_heads": (None, config.heads),
        "positions": ("sinusoidal",),
        "position_wavelengths": ("paper",),
        "activation": tuple(dict.fromkeys(ACTIVATIONS.values())),
        "bias": (True,),
        "embedding_scale": (None, 1.0, math.sqrt(config.d_model)),
    }
    require_fields(config, "MarianMT", supported)


def export(run: Run, step: int, params: Params, folder: Path) -> None:
    """Writes the model to `folder`, which must not exist.

    Ids are those of the SentencePiece models, which are the original ones of an imported model.
    UserError: MarianMT cannot express the model.
    """
    config, tokenizers = run.config.model, run.tokenizers
    check(config)
    orders = _orders(tokenizers, config)
    vocabularies = [_ids(*side) for side in zip(tokenizers, orders, strict=True)]
    separate = vocabularies[0] != vocabularies[1]
    sizes = {"vocab_size": len(orders[0]), "decoder_vocab_size": len(orders[1])}
    special = {
        "eos_token_id": orders[1].index(EOS),
        "pad_token_id": orders[1].index(PAD),
        "decoder_start_token_id": orders[1].index(config.start_id),
    }
    files = {
        "config.json": _model_options(config) | sizes | special,
        "generation_config.json": _search_options(run, orders[1]) | special,
        "tokenizer_config.json": {
            "tokenizer_class": "MarianTokenizer",
            "separate_vocabs": separate,
            "model_max_length": config.max_length,
            **({"bos_token": "<s>"} if BOS in orders[1] else {}),
        },
        "vocab.json": vocabularies[0],
        **({"target_vocab.json": vocabularies[1]} if separate else {}),
    }
    folder.mkdir(parents=True)
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=1, ensure_ascii=False), "utf-8")
    save_file(_arrays(config, params, orders), folder / WEIGHTS, {"format": "pt"})
    add_snippet("huggingface.md", folder, "README.md", tokenizers, ".spm")


def _orders(tokenizers: Tokenizers, config: ModelConfig) -> list[list[int]]:
    """Returns our ids in the order of theirs, which count from 0, for source and target.

    Special ids are the same on both sides, and all ids are where both share embeddings.
    """

    def order(tokenizer: Tokenizer) -> list[int]:
        ids = tokenizer.model_ids
        known = sorted((i for i, id in enumerate(ids) if id >= 0), key=ids.__getitem__)
        needed = {PAD, EOS, UNK, config.start_id}  # not `BOS` if the model never reads it
        return known + sorted(id for id in needed if ids[id] < 0)

    orders = [order(tokenizer) for tokenizer in tokenizers]
    shared = (PAD, EOS, UNK) if config.tied != "all" else orders[0]
    if any(orders[0].index(id) != orders[1].index(id) for id in shared):
        return [[*range(tokenizer.size)] for tokenizer in tokenizers]
    return orders


def _ids(tokenizer: Tokenizer, order: list[int]) -> dict[str, int]:
    """Returns their id of each piece. UserError: transformers would not find one."""
    names = tokenizer.pieces(order)
    names[order.index(UNK)] = "<unk>"
    if wrong := [name for name in names if LANGUAGE.fullmatch(name)]:
        raise UserError(f"piece {wrong[0]!r}: must be '▁{wrong[0]}' to name a language there")
    names = [name[1:] if LANGUAGE.fullmatch(name[1:]) else name for name in names]
    return {name: id for id, name in enumerate(names)}


def _model_options(config: ModelConfig) -> dict[str, Any]:
    encoder, decoder = config.depths
    (activation, *_) = [name for name, ours in ACTIVATIONS.items() if ours == config.activation]
    sizes = {"attention_heads": config.heads, "ffn_dim": config.d_ff}
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "d_model": config.d_model,
        "encoder_layers": encoder,
        **{f"encoder_{name}": size for name, size in sizes.items()},
        "decoder_layers": decoder,
        **{f"decoder_{name}": size for name, size in sizes.items()},
        "max_position_embeddings": config.max_length,
        "activation_function": activation,
        "scale_embedding": config.embedding_scale != 1.0,
        "share_encoder_decoder_embeddings": config.tied == "all",
        "tie_word_embeddings": config.tied != "none",
        "forced_eos_token_id": None,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.ffn_dropout,
    }


def _search_options(run: Run, order: list[int]) -> dict[str, Any]:
    """Returns the search, as far as transformers has it. Its lengths count the start symbol."""
    decode, find = run.config.decode, run.tokenizers.target.find
    beam = {
        "length_penalty": decode.alpha if decode.penalty in ("gnmt", "power") else 0.0,
        "early_stopping": decode.early_stopping or ("never" if decode.lookahead else False),
    }
    suppressed = dict.fromkeys([PAD, *map(find, decode.suppress)])
    return {
        "num_beams": decode.beam,
        **(beam if decode.beam > 1 else {}),
        "min_length": decode.min_length + 1 if decode.min_length else 0,
        "max_length": min(decode.max_length or math.inf, run.config.model.max_length) + 1,
        "no_repeat_ngram_size": decode.no_repeat_ngrams or 0,
        "bad_words_ids": [[order.index(id)] for id in suppressed if id in order],
    }


def _arrays(config: ModelConfig, params: Params, orders: list[list[int]]) -> dict[str, np.ndarray]:
    """Returns the arrays of a `MarianMTModel`, by their names."""
    interleaved = np.arange(config.d_model)
    if config.position_layout == "interleaved":
        interleaved = interleaved.reshape(-1, 2).T.ravel()  # the columns in halves
    arrays: dict[str, np.ndarray] = {}

    def add(path: str, leaf: Any) -> None:
        array, names = np.asarray(leaf, np.float32), paths.dimension_names(path)
        if not names:  # norms
            names = ("d_model",)
        for axis, name in enumerate(names):
            if name == "d_model":
                array = array.take(interleaved, axis)
            elif name == "vocabulary":
                array = array.take(orders[paths.vocabulary_side(path) == "target"], axis)
        if path.endswith("kernel"):
            inputs = [array.shape[axis] for axis in paths.input_dimensions(path, array.ndim) or ()]
            array = array.reshape(math.prod(inputs), -1).T
        elif path.endswith("bias"):
            array = array.reshape(-1)
        arrays[their_name(path, config)] = np.ascontiguousarray(array)

    paths.map_with_paths(add, params)
    bias = arrays.setdefault(BIAS, np.zeros(len(orders[1]), np.float32))
    arrays[BIAS] = bias[None, :]
    if config.decoder_start_id is None:
        # The decoder begins with padding, whose vector is zero, and which is never its output.
        padding = orders[1].index(PAD)
        rows = arrays[their_name("target_embedding/embedding", config)]
        if rows[padding].any():
            rows[padding], bias[padding] = 0, NEVER
    return arrays
