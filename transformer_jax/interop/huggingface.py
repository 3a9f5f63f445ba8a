"""Reads MarianMT models of Hugging Face's transformers, such as those of OPUS-MT.

Options are those of its `MarianConfig`, `GenerationConfig` and `MarianTokenizer`, and names of
arrays those of its `MarianMTModel`. What has no counterpart here is refused by its name and value.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from transformer_jax.attention.positions import sinusoids
from transformer_jax.config import DecodeConfig, ModelConfig
from transformer_jax.errors import UserError, about
from transformer_jax.files import parse_json
from transformer_jax.interop.arrays import params_from_arrays
from transformer_jax.interop.imported import NEVER, PICKLE, Imported, read_file, with_defaults
from transformer_jax.interop.vocabulary import Vocabulary, numbered
from transformer_jax.models.make import abstract_params
from transformer_jax.special_ids import EOS, PAD
from transformer_jax.text.tokenizer import Tokenizer, Tokenizers

WEIGHTS = "model.safetensors"
NORM_EPS = 1e-5
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu", "silu": "silu"}
"""Our names of activations."""

_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("marian",),
    "activation_function": ("gelu", *ACTIVATIONS),
    "scale_embedding": (False, True),
    "share_encoder_decoder_embeddings": (True, False),
    "tie_word_embeddings": (True, False),
    "normalize_embedding": (False,),
    "normalize_before": (False,),
    "add_final_layer_norm": (False,),
    "add_bias_logits": (False,),
    "static_position_embeddings": (True,),
    "extra_pos_embeddings": (0,),
    "do_blenderbot_90_layernorm": (False,),
    "num_beam_groups": (1,),
    "do_sample": (False,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (None,),
    "forced_bos_token_id": (None,),
    "sequence_bias": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "renormalize_logits": (False, True),
    "early_stopping": (False, True, "never"),
    "diversity_penalty": (0.0,),
    "guidance_scale": (None, 1.0),
    "penalty_alpha": (None,),
    "num_return_sequences": (1,),
}
"""Options by which models and searches differ, with the values that have a counterpart here; the
first is that of models that do not name the option."""

_SEARCH = (
    *("num_beams", "length_penalty", "early_stopping", "min_length", "max_length"),
    *("no_repeat_ngram_size", "bad_words_ids", "forced_eos_token_id"),
)
"""Options of the search, of which those that have a file of their own are complete."""

_SUPPORTED_TOKENS: dict[str, tuple[Any, ...]] = {
    "tokenizer_class": ("MarianTokenizer",),
    "separate_vocabs": (False, True),
    "eos_token": ("</s>",),
    "unk_token": ("<unk>",),
    "pad_token": ("<pad>",),
}

_SHARED, _OUTPUT, BIAS = "model.shared.weight", "lm_head.weight", "final_logits_bias"
_EMBEDDINGS = [f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
_POSITIONS = [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]
_PARTS = {
    "layers_": "layers.",
    "self_attention": "self_attn",
    "cross_attention": "encoder_attn",
    "attn_norm": "attn_layer_norm",
    "ffn_norm": "final_layer_norm",
    "ffn/in": "fc1",
    "ffn/out": "fc2",
    "/query": "/q_proj",
    "/key": "/k_proj",
    "/value": "/v_proj",
    "/out": "/out_proj",
    "kernel": "weight",
    "scale": "weight",
    "/": ".",
}
"""What replaces parts of the paths of our parameters, one after the other."""


def load(folder: Path) -> Imported:
    """Reads the folder of a model that transformers has saved.

    UserError: a file is missing or damaged, or the model has an option or an array without a
    counterpart here.
    """
    digests: dict[str, str] = {}
    with about(folder):
        _require_safetensors(folder)
        config, search, tokens = (
            _read_options(folder / name, digests) if (folder / name).exists() else {}
            for name in ("config.json", "generation_config.json", "tokenizer_config.json")
        )
        # Models that are older than generation_config.json have the search in config.json.
        kept = {name: value for name, value in config.items() if not (search and name in _SEARCH)}
        options = _Options(with_defaults(kept | search, _SUPPORTED))
        # In older files, tokens are objects with a content.
        tokens = {k: v.get("content") if isinstance(v, dict) else v for k, v in tokens.items()}
        separate = with_defaults(tokens, _SUPPORTED_TOKENS)["separate_vocabs"]
        vocabularies = _read_vocabularies(folder, digests, separate)
        tokenizers = Tokenizers(*(each.tokenizer for each in vocabularies))
        arrays = _read_arrays(folder / WEIGHTS, digests, options)
        with about("config.json or generation_config.json", TypeError, ValueError):
            model = _config(options, arrays, tokenizers.target)
            impossible, search = _impossible(options), _search(options, tokenizers.target)
        arrays = _with_our_rows(arrays, vocabularies, impossible)
        like = abstract_params(model, *tokenizers.sizes)
        params = params_from_arrays(arrays, like, lambda path: their_name(path, model))
        return Imported(model, search, tokenizers, params, digests)


def their_name(path: str, config: ModelConfig) -> str:
    """Returns the name of a parameter in transformers: model.encoder.layers.0.fc1.weight for that
    of encoder/layers_0/ffn/in/kernel."""
    fixed = {
        "source_embedding/embedding": _EMBEDDINGS[0],
        "target_embedding/embedding": _SHARED if config.tied == "all" else _EMBEDDINGS[1],
        "output": _OUTPUT,
        "output_bias": BIAS,
    }
    if path in fixed:
        return fixed[path]
    for old, new in _PARTS.items():
        path = path.replace(old, new)
    return f"model.{path}"


class _Options(dict[str, Any]):
    """Options by their names."""

    def __missing__(self, name: str) -> Any:
        raise UserError(f"config.json: has no option {name}")


def _read_options(path: Path, digests: dict[str, str]) -> dict[str, Any]:
    """Returns the options of a JSON file that are not null. UserError: it is none."""
    with about(path):
        options = parse_json(read_file(path, digests))
        if not isinstance(options, dict):
            raise UserError("must hold the values of options")
    return {name: value for name, value in options.items() if value is not None}


def _require_safetensors(folder: Path) -> None:
    """UserError: the folder holds no weights that can be read without executing code."""
    if (folder / WEIGHTS).is_file():
        return
    pickles = [path.name for path in folder.glob("pytorch_model*.bin")]
    way = f"; {min(pickles)} {PICKLE}" if pickles else ""
    raise UserError(f"{folder / WEIGHTS}: no such file{way}")


def _read_vocabularies(folder: Path, digests: dict[str, str], separate: bool) -> list[Vocabulary]:
    """Returns those of source and target. UserError: a file is missing or damaged."""
    source, target = (read_file(folder / f"{side}.spm", digests) for side in ("source", "target"))
    apart = {"vocab.json": {"source": source}, "target_vocab.json": {"target": target}}
    together = {"vocab.json": {"source": source, "target": target}}
    vocabularies: list[Vocabulary] = []
    for name, models in (apart if separate else together).items():
        with about(folder / name):
            vocabularies += numbered(models, parse_json(read_file(folder / name, digests)))
    return vocabularies


def _read_arrays(path: Path, digests: dict[str, str], options: _Options) -> dict[str, np.ndarray]:
    """Returns the arrays in float32, one for those that are the same.

    UserError: the file is damaged, an array is no number or no float, or arrays differ that the
    model shares.
    """
    read_file(path, digests)  # for its digest: safetensors reads bfloat16 from a file only
    with about(f"{path}: cannot be read", SafetensorError, TypeError, KeyError):
        arrays = load_file(path)
    for name, array in arrays.items():
        if array.dtype.name not in ("float32", "float16", "bfloat16"):
            raise UserError(f"{name}: is of the type {array.dtype}; must be float32")
        arrays[name] = array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise UserError(f"{name}: holds numbers that are not finite")
    for name in set(_POSITIONS) & {*arrays}:
        array = arrays.pop(name)
        close = array.ndim == 2 and array.shape[1] % 2 == 0
        if not close or np.abs(array - sinusoids(*array.shape, layout="halves")).max() > 0.005:
            raise UserError(f"{name}: must be the sinusoids of transformers")
    if options["tie_word_embeddings"]:
        shared = options["share_encoder_decoder_embeddings"]
        same = [_SHARED, *_EMBEDDINGS, _OUTPUT] if shared else [_EMBEDDINGS[1], _OUTPUT]
        first, *others = [name for name in same if name in arrays] or same
        for name in others:
            if not np.array_equal(arrays.pop(name, arrays[first]), arrays[first]):
                way = "such models of OPUS-MT were converted wrongly; take another one"
                raise UserError(f"{name}: differs from {first}, with which it is tied; {way}")
        arrays |= {same[0]: arrays.pop(first)} if first in arrays else {}
    return arrays


def _config(options: _Options, arrays: Mapping[str, np.ndarray], target: Tokenizer) -> ModelConfig:
    """Returns the model. UserError: a part of it has no counterpart here."""
    for name in ("attention_heads", "ffn_dim"):
        sides = [f"{side}_{name}" for side in ("encoder", "decoder")]
        if options[sides[0]] != options[sides[1]]:
            values = ", ".join(f"{each}={options[each]!r}" for each in sides)
            raise UserError(f"{values}: must be the same")
    shared, tied = options["share_encoder_decoder_embeddings"], options["tie_word_embeddings"]
    if shared and not tied:
        raise UserError("tie_word_embeddings=False: must be True with shared embeddings")
    start: int | None = _our_id(options["decoder_start_token_id"], "decoder_start_token_id", target)
    embeddings = arrays.get(_SHARED if shared else _EMBEDDINGS[1], np.zeros((0, 0)))
    if start == PAD and not embeddings[target.model_ids[PAD] :][:1].any():
        start = None
    return ModelConfig(
        layers=options["encoder_layers"],
        decoder_layers=options["decoder_layers"],
        d_model=options["d_model"],
        heads=options["encoder_attention_heads"],
        d_ff=options["encoder_ffn_dim"],
        max_length=options["max_position_embeddings"],
        norm_eps=NORM_EPS,
        position_layout="halves",
        activation=ACTIVATIONS[options["activation_function"]],
        tied="all" if shared else "decoder" if tied else "none",
        output_bias=True,
        embedding_scale=None if options["scale_embedding"] else 1.0,
        decoder_start_id=start,
        dropout=options.get("dropout", 0.1),
        attention_dropout=options.get("attention_dropout", 0.0),
        ffn_dropout=options.get("activation_dropout", 0.0),
    )


def _our_id(value: Any, name: str, target: Tokenizer) -> int:
    """Returns our id for the one that an option names. UserError: the target has no such id."""
    (value,) = value if isinstance(value, list) and len(value) == 1 else (value,)
    if type(value) is not int or value not in target.model_ids or value < 0:
        raise UserError(f"{name}={value!r}: must be an id of the target vocabulary")
    return target.model_ids.index(value)


def _impossible(options: Mapping[str, Any]) -> list[int]:
    """Returns the ids whose probability is 0. UserError: tokens are suppressed in a row only.

    Where the search renormalizes, the others have the probabilities of these.
    """
    words = options.get("bad_words_ids", [])
    for word in words:
        if not isinstance(word, list) or len(word) != 1:
            raise UserError(f"bad_words_ids: holds {word!r}; must hold lists of one id")
    return [word[0] for word in words] if options["renormalize_logits"] else []


def _search(options: Mapping[str, Any], target: Tokenizer) -> DecodeConfig:
    """Returns the search. UserError: there is none like it.

    Their lengths count the start symbol. Where an output of the greatest length ends by force, it
    has one token less besides the end symbol.
    """
    longest = options.get("max_length", options["max_position_embeddings"]) - 1
    longest = options.get("max_new_tokens", longest)
    special = {"eos_token_id": EOS, "pad_token_id": PAD}
    if "forced_eos_token_id" in options:
        special["forced_eos_token_id"] = EOS
        longest -= 1
    for name, id in special.items():
        if _our_id(options[name], name, target) != id:
            (piece,) = target.pieces([id])
            raise UserError(f"{name}={options[name]!r}: must be the id of {piece}")
    words = options.get("bad_words_ids", [])
    suppressed = [_our_id(id, "bad_words_ids", target) for (id,) in words]
    return DecodeConfig(
        beam=options.get("num_beams", 1),
        penalty="power",
        alpha=float(options.get("length_penalty", 1.0)),
        early_stopping=options["early_stopping"] is True,
        lookahead=options["early_stopping"] == "never",
        min_length=max(options.get("min_length", 0) - 1, options.get("min_new_tokens", 0), 0),
        max_length=longest,
        max_ratio=float(longest),  # no limit: a source has at least its end symbol
        no_repeat_ngrams=options.get("no_repeat_ngram_size") or None,
        suppress=tuple(target.pieces([id for id in suppressed if id != PAD])),
    )


def _with_our_rows(
    arrays: Mapping[str, np.ndarray], vocabularies: Sequence[Vocabulary], impossible: Sequence[int]
) -> dict[str, np.ndarray]:
    """Returns the arrays with rows for our ids. UserError: as `Vocabulary.rows`."""
    source, target = vocabularies
    bias = arrays.get(BIAS, np.zeros(target.size, np.float32)).reshape(-1)
    bias[[id for id in impossible if id < len(bias)]] = NEVER
    tables = {_EMBEDDINGS[0]: source, **dict.fromkeys((_SHARED, _EMBEDDINGS[1], _OUTPUT), target)}
    ours = {
        # Matrices of dense layers are [outputs, inputs] there.
        name: tables[name].rows(name, array) if name in tables else array.T
        for name, array in arrays.items()
    }
    return ours | {BIAS: target.rows(BIAS, bias, NEVER)}
