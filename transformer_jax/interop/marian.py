"""Reads models of Marian and of Firefox's translations, with the vocabularies beside them.

Names and options are those of Marian's `transformer.h`. What has no counterpart here is refused by
its name and value.
"""

import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from transformer_jax.config import DecodeConfig, ModelConfig
from transformer_jax.errors import UserError, about
from transformer_jax.interop.arrays import params_from_arrays
from transformer_jax.interop.imported import NEVER, Imported, read_file, with_defaults
from transformer_jax.interop.marian_file import read
from transformer_jax.interop.vocabulary import Vocabulary, numbered
from transformer_jax.models.make import abstract_params
from transformer_jax.text.tokenizer import Tokenizer, Tokenizers

MAX_LENGTH = 512
"""Greatest length in tokens of a model without learned positions, which Marian does not limit."""

_ACTIVATIONS = {"swish": "silu", "relu": "relu", "gelu": "quick_gelu"}
"""Our names of Marian's activations. Its gelu is x · sigmoid(1.702 x)."""

_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "type": ("transformer",),
    "transformer-ffn-depth": (2,),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-decoder-dim-ffn": (0,),
    "transformer-no-projection": (False,),
    "transformer-no-bias": (False,),
    "transformer-no-affine": (False,),
    "transformer-rnn-projection": (False,),
    "transformer-pool": (False,),
    "transformer-tied-layers": ([],),
    "transformer-train-position-embeddings": (False,),
    "transformer-postprocess-emb": ("d", ""),
    "transformer-decoder-autoreg": ("self-attention", "rnn"),
    "transformer-ffn-activation": tuple(_ACTIVATIONS),
    "right-left": (False,),
    "ulr": (False,),
    "lemma-dim-emb": (0,),
    "tied-embeddings-src": (False,),
    "input-types": ([],),
}
"""Options by which models differ, with the values that have a counterpart here."""

_READ = {
    *_SUPPORTED,
    *(f"transformer-{name}" for name in ("heads", "dim-ffn", "train-positions")),
    *(f"transformer-{name}" for name in ("preprocess", "postprocess", "postprocess-top")),
}
_UNUSED = re.compile("transformer-(dim-aan|aan-.*|dropout.*|depth-scaling|guided-alignment-layer)")
"""Options of other layers, and of training."""

_LARGEST_OPTIONS = 1 << 16
"""Size of a file of options in bytes."""

_BIAS = "decoder_ff_logit_out_b"
_SUBLAYERS = {
    "self_attention/query": "self_Wq self_bq",
    "self_attention/key": "self_Wk self_bk",
    "self_attention/value": "self_Wv self_bv",
    "self_attention/out": "self_Wo self_bo",
    "self_attention/candidate": "rnn_W",
    "self_attention/forget": "rnn_Wf rnn_bf",
    "cross_attention/query": "context_Wq context_bq",
    "cross_attention/key": "context_Wk context_bk",
    "cross_attention/value": "context_Wv context_bv",
    "cross_attention/out": "context_Wo context_bo",
    "ffn/in": "ffn_W1 ffn_b1",
    "ffn/out": "ffn_W2 ffn_b2",
}
"""Marian's names of the matrix and the bias of each dense layer, after those of the layer."""

_NORMS = {
    "self_attention_norm": "self_Wo",
    "cross_attention_norm": "context_Wo",
    "ffn_norm": "ffn_ffn",
}


def load(source: Path) -> Imported:
    """Reads a model file, or the one of a folder, with the vocabularies beside it.

    UserError: a file is missing, damaged or no model of Marian, or the model has an option or an
    array without a counterpart here.
    """
    path = _find_model(source) if source.is_dir() else source
    digests: dict[str, str] = {}
    given, arrays = read(path, digests)
    options, files = _find_vocabularies(path.parent, digests)
    vocabularies = _read_vocabularies(files, digests)
    for shortlist in path.parent.glob("lex*.bin"):
        read_file(shortlist, digests)  # so that translating knows which ones are the model's
    tokenizers = Tokenizers(*(each.tokenizer for each in vocabularies))
    with about(path):
        config, decode = _config(given, arrays), _search(options)
        arrays = _with_our_rows(arrays, config, vocabularies)
        like = abstract_params(config, *tokenizers.sizes)
        params = params_from_arrays(arrays, like, lambda ours: _their_name(ours, config))
    return Imported(config, decode, tokenizers, params, digests)


def _config(given: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> ModelConfig:
    if given.get("tied-embeddings-all"):
        given["tied-embeddings-src"] = False  # which it includes
    options = with_defaults(given, _SUPPORTED)
    for name in sorted(map(str, options)):
        if name.startswith("transformer-") and name not in _READ and not _UNUSED.fullmatch(name):
            raise UserError(f"{name}={reprlib.repr(options[name])}: has no counterpart here")
    recurrent = options["transformer-decoder-autoreg"] == "rnn"
    if recurrent and (cell := options.get("dec-cell")) != "ssru":
        raise UserError(f"dec-cell={cell!r}: has no counterpart here; must be 'ssru'")
    learned = options.get("transformer-train-positions", False)
    decoder_tied = "decoder" if options.get("tied-embeddings") else "none"
    sizes = {
        "layers": "enc-depth",
        "decoder_layers": "dec-depth",
        "d_model": "dim-emb",
        "heads": "transformer-heads",
        "d_ff": "transformer-dim-ffn",
    }
    for name in sizes.values():
        if type(options.get(name)) is not int:
            raise UserError(f"{name}={options.get(name)!r}: must be a whole number")
    return ModelConfig(
        **{ours: options[name] for ours, name in sizes.items()},
        max_length=len(arrays["Wpos"]) if "Wpos" in arrays else MAX_LENGTH,
        norm=_norm(options),
        positions="learned" if learned else "sinusoidal",
        position_layout="halves",
        position_wavelengths="marian",
        embedding_scale=1.0 if learned else None,
        activation=_ACTIVATIONS[options["transformer-ffn-activation"]],
        tied="all" if options.get("tied-embeddings-all") else decoder_tied,
        output_bias=True,
        decoder_start_id=None,
        dropout=0.0,  # which a file does not say: small models are trained without
        self_layer="ssru" if recurrent else "attention",
    )


def _norm(options: Mapping[str, Any]) -> Any:
    """Returns where layers are normalized. UserError: nowhere, or in more than one place."""
    names = ("transformer-preprocess", "transformer-postprocess", "transformer-postprocess-top")
    # d: dropout, a: the residual sum, n: layer normalization.
    steps = tuple(str(options.get(name, "")).replace("d", "") for name in names)
    known: dict[tuple[str, ...], str] = {("", "an", ""): "post", ("n", "a", "n"): "pre"}
    if steps not in known:
        given = ", ".join(f"{name}={options.get(name)!r}" for name in names)
        raise UserError(f"{given}: must be '', 'dan', '' (post-norm) or 'n', 'da', 'n' (pre-norm)")
    return known[steps]


def _with_our_rows(
    arrays: Mapping[str, np.ndarray], config: ModelConfig, vocabularies: Sequence[Vocabulary]
) -> dict[str, np.ndarray]:
    """Returns the arrays of the model with rows for our ids. UserError: as `Vocabulary.rows`."""
    source, target = vocabularies
    output, embeddings = (
        _their_name(path, config) for path in ("output", "target_embedding/embedding")
    )
    ours = {name: array.T if name in (output, _BIAS) else array for name, array in arrays.items()}
    # Without a bias (output-omit-bias) only that of the ids that the model lacks is needed.
    ours.setdefault(_BIAS, np.zeros((target.size, 1), np.float32))
    tables = {"encoder_Wemb": source, embeddings: target, output: target, _BIAS: target}
    for name, vocabulary in tables.items():
        if name in ours:
            new = NEVER if name == _BIAS else None
            ours[name] = vocabulary.rows(name, ours[name], new)
    return ours


def _their_name(path: str, config: ModelConfig) -> str:
    """Returns Marian's name of a parameter: encoder_l1_self_Wq for that of
    encoder/layers_0/self_attention/query/kernel."""
    fixed = {
        "source_embedding/embedding": "encoder_Wemb",
        "target_embedding/embedding": "Wemb" if config.tied == "all" else "decoder_Wemb",
        "source_embedding/positions": "Wpos",
        "target_embedding/positions": "Wpos",
        "output": "decoder_ff_logit_out_W",
        "output_bias": _BIAS,
    }
    if path in fixed:
        return fixed[path]
    if match := re.fullmatch(r"(encoder|decoder)/norm/(\w+)", path):
        return f"{match[1]}_top_ln_{match[2]}"
    match = re.fullmatch(r"(encoder|decoder)/layers_(\d+)/(\w+)(/.*)?/(\w+)", path)
    assert match is not None
    prefix, layer, kind = f"{match[1]}_l{int(match[2]) + 1}_", match[3] + (match[4] or ""), match[5]
    if layer not in _NORMS:
        matrix, *bias = _SUBLAYERS[layer].split()
        return prefix + (matrix if kind == "kernel" else bias[0])
    recurrent = config.self_layer == "ssru" and match[1] == "decoder"
    name = "rnn_ffn" if recurrent and layer == "self_attention_norm" else _NORMS[layer]
    return f"{prefix}{name}_ln_{kind}{'_pre' if config.norm == 'pre' else ''}"


def _find_model(folder: Path) -> Path:
    models = [path for path in sorted(folder.glob("*")) if path.suffix in (".npz", ".bin")]
    models = [path for path in models if not path.name.startswith("lex.")]
    if len(models) != 1:
        names = ", ".join(path.name for path in models) or "none"
        raise UserError(f"{folder}: has {len(models)} models ({names}); name the file of one")
    return models[0]


def _find_vocabularies(
    folder: Path, digests: dict[str, str]
) -> tuple[Mapping[str, Any], list[Path]]:
    """Returns the options of the search, and the vocabularies of source and target in a folder.

    A YAML file of the decoder names them; otherwise they are the SentencePiece models there.
    """
    for path in sorted(folder.glob("*.yml")):
        # Vocabularies are larger and take seconds.
        options = _read_yaml(path, digests) if path.stat().st_size < _LARGEST_OPTIONS else None
        if isinstance(options, dict) and isinstance(options.get("vocabs"), list):
            names = options["vocabs"]
            files = [name for name in names if isinstance(name, str) and Path(name).name == name]
            if len(names) != 2 or files != names:
                raise UserError(
                    f"{path}: vocabs={reprlib.repr(names)}: must be two files in its folder"
                )
            return options, [folder / name for name in names]
    models = sorted(folder.glob("*.spm"), key=lambda path: (path.name[:1] != "s", path.name))
    if len(models) not in (1, 2):
        raise UserError(f"{folder}: has {len(models)} SentencePiece models (*.spm); must be 1 or 2")
    return {}, [models[0], models[-1]]


def _read_yaml(path: Path, digests: dict[str, str], loader: Any = yaml.SafeLoader) -> Any:
    data = read_file(path, digests)
    with about(f"{path}: is no YAML", yaml.YAMLError, UnicodeDecodeError):
        return yaml.load(data, loader)


def _read_vocabularies(paths: Sequence[Path], digests: dict[str, str]) -> list[Vocabulary]:
    """Returns the vocabularies of source and target.

    paths: SentencePiece models whose ids are the model's, or YAML files with the id of each piece,
    beside source.spm and target.spm. UserError: one is missing or damaged.
    """
    read: dict[Path, list[Vocabulary]] = {}
    for path in dict.fromkeys(paths):
        with about(path):
            if path.suffix == ".spm":
                tokenizer = Tokenizer(read_file(path, digests))  # whose ids are the model's
                read[path] = [Vocabulary(tokenizer, max(tokenizer.model_ids) + 1)] * 2
            else:
                models = {
                    side: read_file(path.with_name(f"{side}.spm"), digests)
                    for side in ("source", "target")
                }
                # Which takes pieces such as no and 12 for text.
                read[path] = numbered(models, _read_yaml(path, digests, yaml.BaseLoader))
    return [read[path][side] for side, path in enumerate(paths)]


def _search(options: Mapping[str, Any]) -> DecodeConfig:
    """Returns the search that a decoder's options describe. UserError: there is none like it."""
    if penalty := options.get("word-penalty"):
        penalty = reprlib.repr(penalty)
        raise UserError(f"word-penalty={penalty}: has no counterpart here; must be 0")
    given = {"beam-size": 4, "normalize": 0, "max-length-factor": 3} | {**options}
    for name in ("beam-size", "normalize", "max-length-factor"):
        if not isinstance(given[name], int | float):
            raise UserError(f"{name}={reprlib.repr(given[name])}: must be a number")
    return DecodeConfig(
        beam=int(given["beam-size"]),
        penalty="power",
        alpha=float(given["normalize"]),
        max_ratio=float(given["max-length-factor"]),
        early_stopping=True,
        suppress=("<s>", "<unk>"),
    )
