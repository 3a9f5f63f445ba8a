"""What a run is: frozen dataclasses in the paper's terms, validated when made, JSON in and out.

A config file is Python with a function `get_config() -> Config`. The resolved config is stored in
the run as JSON; `from_json` reads it back and refuses unknown keys with the nearest known name.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

_NOT_COMPARED = {"compared": False}
"""Metadata of a field that says how long or how a run is executed, or how it is searched: a run
continues under another value of it."""


def _convert(name: str, value: Any, hint: Any) -> Any:
    """`value` as `hint` wants it (a list as a tuple, an int as a float); ValueError otherwise."""
    origin = get_origin(hint)
    if origin is Literal:
        if value in get_args(hint):
            return value
        choices = [str(choice) for choice in get_args(hint)]
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(choices)}")
    if origin is types.UnionType:
        return None if value is None else _convert(name, value, get_args(hint)[0])
    if origin is tuple:
        return _convert_tuple(name, value, get_args(hint))
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"{name}={value!r}: must be {_describe(hint)}")
    if hint is float and value != value:
        raise ValueError(f"{name}={value!r}: must be a number")
    return value


def _convert_tuple(name: str, value: Any, item_hints: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name}={value!r}: must be a list")
    if item_hints[-1] is not Ellipsis and len(value) != len(item_hints):
        raise ValueError(f"{name}={value!r}: must have {len(item_hints)} items")
    return tuple(_convert(name, item, item_hints[0]) for item in value)


def _describe(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    return names.get(hint, f"a {getattr(hint, '__name__', hint)}")


class _Section:
    """A part of the config: its values are checked when it is made."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(typing.cast(Any, self)):
            value = _convert(f"{self._name()}{f.name}", getattr(self, f.name), hints[f.name])
            object.__setattr__(self, f.name, value)
        self._validate()

    @classmethod
    def _name(cls) -> str:
        """The prefix of the section's fields in messages: "model." for `ModelConfig`."""
        return cls.__name__.removesuffix("Config").lower() + "."

    def _validate(self) -> None:
        pass

    def _require(self, ok: bool, name: str, want: str) -> None:
        if not ok:
            raise ValueError(f"{self._name()}{name}={getattr(self, name)!r}: must be {want}")

    def _require_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            self._require(value is None or value > 0, name, "above 0")

    def _require_rate(self, *names: str) -> None:
        for name in names:
            self._require(0 <= getattr(self, name) < 1, name, "at least 0 and below 1")


@dataclass(frozen=True)
class AttentionConfig(_Section):
    """One of the model's three attentions: how a query weighs the keys."""

    kind: str = "soft"
    """Which keys count: soft (all, the paper's), local-m, local-p, hard, gumbel, latent, plain, or
    the label of a kind of your own."""
    score: Literal["scaled_dot", "dot", "general", "additive", "location"] = "scaled_dot"
    """How well a query matches a key; scaled_dot is the paper's (section 3.2.1)."""
    window: int | None = None
    """Positions on each side of a window's centre (D), for the local kinds."""
    layer: int | None = None
    """The only layer of its stack, from 0, of this kind, others being soft; None: every layer."""
    entropy: float = 0.01
    """Weight of the entropy bonus of hard attention (λ_e of Xu et al. 2015, section 4.1)."""
    reward: float = 0.1
    """Weight of what hard attention learns from its rewards (λ_r there): they are noisy, and in the
    gradients of whatever lies below the layer they drown the loss where they weigh as much."""

    @classmethod
    def _name(cls) -> str:
        return "model.*_attention."

    def of_layer(self, layer: int) -> AttentionConfig:
        """What layer number `layer` of the stack has."""
        return self if self.layer in (None, layer) else AttentionConfig()


_KINDS = ("soft", "hard", "gumbel", "local-m", "local-p", "latent", "plain")
_SENSELESS = {
    "local-m": "since labels stand at no place in the sentence",
    "hard": "since it is trained in one layer of cross_attention",
    "latent": "since its second weights need a whole sentence, as in cross_attention",
    "local-p": "since a sentence's length is unknown while it is decoded",
    "plain": "since it has no queries of its own",
}


@dataclass(frozen=True)
class ModelConfig(_Section):
    """The Transformer's architecture (Vaswani et al. 2017, section 3). Defaults: the base model."""

    labels: int | None = None
    """With a number, the model classifies: a target is at most so many labels, one token each, and
    each looks at the source with a `cross_attention` of its own query. None: it translates."""
    layers: int = 6
    """Encoder layers (N); 0, which is for labels only: they look at the embeddings."""
    decoder_layers: int | None = None
    """Decoder layers (M); None: as many as the encoder's."""
    d_model: int = 512
    """Width of the embeddings and of every sub-layer's output."""
    heads: int = 8
    """Attention heads; must divide d_model."""
    kv_heads: int | None = None
    """Heads of keys and values, shared by groups of query heads; must divide heads; None: heads."""
    d_ff: int = 2048
    """Width of the feed-forward's hidden layer."""
    max_length: int = 256
    """The longest sentence, in tokens with the end symbol; longer input is cut with a warning. An
    output has at most so many, and at most 2 S + 10 for a source of S tokens."""
    norm: Literal["post", "pre"] = "post"
    """Layer normalisation after each residual sum (the paper) or before each sub-layer."""
    norm_eps: float = 1e-6
    """Added to the variance in layer normalisation."""
    positions: Literal["sinusoidal", "learned", "rotary", "alibi", "relative", "none"] = (
        "sinusoidal"
    )
    """How positions are encoded: added to embeddings (section 3.5: sinusoidal, learned), or within
    self-attention (rotary, alibi, relative)."""
    position_layout: Literal["interleaved", "halves"] = "interleaved"
    """Sine and cosine in alternating columns (the paper) or in two halves."""
    activation: Literal["relu", "gelu", "silu", "swiglu"] = "relu"
    """The feed-forward's non-linearity; gelu is the exact one, swiglu adds a gate."""
    tied: Literal["all", "decoder", "none"] = "all"
    """Which embeddings share one matrix: both and the logits, the target's and the logits, none.
    With all, both sides also share their learned positions."""
    bias: bool = True
    """Biases in attention projections and feed-forward."""
    output_bias: bool = False
    """A bias on the logits."""
    embedding_scale: float | None = None
    """Factor on embeddings; None: the square root of d_model (section 3.4)."""
    decoder_start_id: int = 1
    """The id that the decoder reads first; 1 is the tokenizer's begin symbol."""
    dropout: float = 0.1
    """Dropout on sub-layer outputs and on embeddings (section 5.4)."""
    encoder_attention: AttentionConfig = AttentionConfig()
    """The encoder's self-attention."""
    decoder_attention: AttentionConfig = AttentionConfig()
    """The decoder's self-attention."""
    cross_attention: AttentionConfig = AttentionConfig()
    """The decoder's attention over the memory."""
    attention_dropout: float = 0.0
    """Dropout on attention weights."""
    ffn_dropout: float = 0.0
    """Dropout on the feed-forward's hidden layer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation; parameters, softmax, logits and loss stay float32."""

    def _validate(self) -> None:
        self._require_positive("decoder_layers", "d_model", "heads", "d_ff", "norm_eps", "labels")
        if self.labels is None:
            self._require_positive("layers")
        else:
            self._validate_classifier()
        self._require(self.max_length >= 2, "max_length", "at least 2 (a token and the end symbol)")
        divisors = [n for n in range(1, self.d_model + 1) if self.d_model % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - self.heads))
        self._require(
            self.d_model % self.heads == 0,
            "heads",
            f"a divisor of model.d_model={self.d_model}, such as {nearest}",
        )
        groups = self.kv_heads is None or (self.kv_heads > 0 and self.heads % self.kv_heads == 0)
        self._require(groups, "kv_heads", f"a divisor of model.heads={self.heads}")
        even = self.positions != "sinusoidal" or self.d_model % 2 == 0
        self._require(even, "d_model", "even for sinusoidal positions")
        even = self.positions != "rotary" or self.head_size % 2 == 0
        self._require(even, "d_model", f"an even multiple of model.heads={self.heads} for rotary")
        self._require(self.decoder_start_id >= 0, "decoder_start_id", "at least 0")
        self._require_rate("dropout", "attention_dropout", "ffn_dropout")
        self._require_positive("embedding_scale")
        encoder, decoder = self.depths
        self._validate_attention("encoder_attention", encoder, ("hard", "latent"))
        self._validate_attention("decoder_attention", decoder, ("hard", "latent", "local-p"))
        unplaced = () if self.labels is None else ("local-m",)
        self._validate_attention("cross_attention", decoder, ("plain", *unplaced))

    def _validate_classifier(self) -> None:
        self._require(self.layers >= 0, "layers", "at least 0")
        self._require(self.tied == "none", "tied", "none where labels are set: they are no words")
        missing = {"decoder_layers": "decoder", "decoder_attention": "decoder"}
        if self.layers == 0:
            missing["encoder_attention"] = "encoder layer"
            outside = self.positions in ("sinusoidal", "learned", "none")
            self._require(outside, "positions", "sinusoidal, learned or none where model.layers=0")
        for name, part in missing.items():
            left_out = getattr(self, name) in (None, AttentionConfig())
            self._require(left_out, name, f"left out where the model has no {part}")

    def _validate_attention(self, name: str, depth: int, senseless: tuple[str, ...]) -> None:
        """`senseless`: kinds that make no sense in this place."""
        attention: AttentionConfig = getattr(self, name)

        def require(ok: bool, field: str, want: str) -> None:
            if not ok:
                value = getattr(attention, field)
                raise ValueError(f"model.{name}.{field}={value!r}: must be {want}")

        kind, layer, window = attention.kind, attention.layer, attention.window
        require(kind not in senseless, "kind", f"another kind, {_SENSELESS.get(kind)}")
        local = kind in ("local-m", "local-p")
        require(window is None or window > 0, "window", "at least 1")
        require(not local or window is not None, "window", f"at least 1 for the kind {kind}")
        own = local or kind not in _KINDS  # a user's kind may have a window
        require(own or window is None, "window", f"left out for the kind {kind}")
        plain = kind == "plain"
        require(not plain or attention.score == "scaled_dot", "score", "left out for plain")
        turned = plain and self.positions == "rotary"
        self._require(not turned, "positions", "other than rotary with attention of kind plain")
        require(layer is None or 0 <= layer < depth, "layer", f"from 0 to {depth - 1}")
        require(kind != "hard" or layer is not None, "layer", f"named (0 to {depth - 1}) for hard")
        require(attention.entropy >= 0, "entropy", "at least 0")
        require(attention.reward > 0, "reward", "above 0")
        whole = kind in ("hard", "gumbel", "local-p", "latent")
        if self.attention_dropout and (whole or attention.score in ("additive", "location")):
            what = f"kind {kind}" if whole else f"score {attention.score}"
            self._require(False, "attention_dropout", f"0 with attention of {what}")

    @property
    def head_size(self) -> int:
        """Width of one head (H)."""
        return self.d_model // self.heads

    @property
    def depths(self) -> tuple[int, int]:
        """(encoder layers, decoder layers); the one attention of labels counts as a layer."""
        if self.labels is not None:
            return self.layers, 1
        return self.layers, self.layers if self.decoder_layers is None else self.decoder_layers


TINY = ModelConfig(layers=4, d_model=128, heads=4, d_ff=256, dropout=0.3)
"""For corpora of some 30,000 pairs (Wu et al. 2021)."""
SMALL = ModelConfig(layers=3, d_model=256, heads=4, d_ff=1024, dropout=0.3)
"""For corpora of some 100,000 pairs."""
BASE = ModelConfig()
"""The paper's base model (table 3)."""
BIG = ModelConfig(d_model=1024, heads=16, d_ff=4096, dropout=0.3)
"""The paper's big model (table 3)."""


@dataclass(frozen=True)
class TokenizerConfig(_Section):
    """Subwords: SentencePiece models trained by the tool or given by path."""

    kind: Literal["bpe", "unigram", "word"] = "bpe"
    """The kind of SentencePiece model to train. Of words, those not in training are unknown."""
    vocabulary: int = 8000
    """Number of ids of a trained model, special ones and the 256 bytes of the fallback included. Of
    words there is no fallback, and there may be fewer."""
    joint: bool = True
    """One vocabulary for both languages, or one each."""
    symbols: tuple[str, ...] = ()
    """Strings that are always one piece, such as placeholders."""
    sampling: float = 0.0
    """Subword sampling in training; 0: off. BPE: the probability, below 1, of leaving a merge out
    (BPE-dropout). Unigram: alpha, the exponent of the probability of each way to cut; smaller is
    more random, so that 0.01 is nearly uniform. A sentence with an unknown piece keeps its ids, and
    so does a pair whose sample is longer than the longest sentence of its side."""
    models: tuple[str, ...] = ()
    """Paths of your own SentencePiece models: one for both languages, or source and target. Their
    kinds decide how subwords are sampled, not tokenizer.kind."""

    def _validate(self) -> None:
        self._require(self.vocabulary > 260, "vocabulary", "above 260 (4 special ids, 256 bytes)")
        self._require(0 <= self.sampling < math.inf, "sampling", "at least 0 and finite")
        whole = self.kind == "word" and not self.models
        self._require(not whole or self.sampling == 0, "sampling", "0 for tokenizer.kind=word")
        merges = self.kind == "bpe" and not self.models
        self._require(not merges or self.sampling < 1, "sampling", "below 1 for tokenizer.kind=bpe")
        self._require(len(self.models) <= 2, "models", "one path, or two (source, target)")
        ok = not self.models or (len(self.models) == 1) == self.joint
        self._require(
            ok,
            "models",
            f"{'one path' if self.joint else 'two paths'} when tokenizer.joint={self.joint}",
        )
        self._require(all(self.symbols), "symbols", "non-empty strings")


@dataclass(frozen=True)
class DataConfig(_Section):
    """Where the pairs come from and how they become batches.

    A corpus is `grammar` or `recipes` (built in), `SOURCE,TARGET` (two text files), `FILE.tsv` or
    `FILE.jsonl`; each file may be gzipped (`.gz`).
    """

    train: tuple[str, ...] = ("grammar",)
    """Corpora to train on."""
    dev: tuple[str, ...] = ("grammar",)
    """Development corpora; the first one chooses the best checkpoint."""
    fields: tuple[str, str] = ("source", "target")
    """Names of the two fields of a JSONL line."""
    max_ratio: float = 9.0
    """Pairs whose token counts differ by more than this factor are left out of training."""
    batch_tokens: int = 4096
    """Token slots on each side of a batch, padding included."""
    shapes: int = 8
    """At most so many batch shapes, each one a compiled program."""
    packing: bool = False
    """Several pairs in one row, with one batch shape."""
    packed_length: int = 128
    """Length of the rows when packing."""
    workers: int = field(default=2, metadata=_NOT_COMPARED)
    """Threads that tokenise. Subword sampling is one thread of Python, whatever this says."""
    cache: str = field(default="", metadata=_NOT_COMPARED)
    """Folder for tokenised corpora; empty: the user's cache folder."""

    def _validate(self) -> None:
        self._require(len(self.train) > 0, "train", "at least one corpus")
        self._require(all(self.fields), "fields", "two names")
        self._require(self.max_ratio >= 1, "max_ratio", "at least 1")
        self._require_positive("batch_tokens", "shapes", "packed_length", "workers")


@dataclass(frozen=True)
class OptimizerConfig(_Section):
    """Adam, its schedule and what is done to gradients (section 5.3)."""

    schedule: Literal["noam", "inverse_sqrt", "cosine", "linear"] = "noam"
    """Shape of the learning rate after its linear warm-up."""
    learning_rate: float = 1.0
    """The peak; for noam the factor on d_model^-0.5 · min(step^-0.5, step · warmup^-1.5)."""
    warmup: int = 4000
    """Steps of linear warm-up."""
    decay_steps: int | None = None
    """Step at which cosine and linear reach 0."""
    b1: float = 0.9
    """Adam's decay of the first moment."""
    b2: float = 0.98
    """Adam's decay of the second moment."""
    eps: float = 1e-9
    """Adam's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay (AdamW), on matrices only: norms and biases are left alone."""
    clip_norm: float | None = None
    """Largest global norm of the gradient; None: no clipping."""
    label_smoothing: float = 0.1
    """Probability spread evenly over the vocabulary (section 5.4)."""
    accumulate: int = 1
    """Pieces that a batch is computed in, one after the other, to save memory."""
    ema: float | None = None
    """Decay of the moving average of the weights that is evaluated and kept; None: off."""

    def _validate(self) -> None:
        self._require_positive("learning_rate", "warmup", "decay_steps", "eps", "clip_norm")
        self._require_positive("accumulate")
        self._require_rate("b1", "b2", "label_smoothing")
        self._require(self.weight_decay >= 0, "weight_decay", "at least 0")
        self._require(self.ema is None or 0 < self.ema < 1, "ema", "between 0 and 1")
        if self.schedule in ("cosine", "linear"):
            ok = self.decay_steps is not None and self.decay_steps > self.warmup
            need = f"above optimizer.warmup={self.warmup} for the {self.schedule} schedule"
            self._require(ok, "decay_steps", need)


@dataclass(frozen=True)
class TrainConfig(_Section):
    """How long to train, and what is measured and kept on the way."""

    seed: int = 0
    """Of initialisation, batches, dropout and subword sampling."""
    steps: int | None = field(default=None, metadata=_NOT_COMPARED)
    """Stop after so many updates."""
    epochs: int | None = field(default=None, metadata=_NOT_COMPARED)
    """Stop after so many passes over the data."""
    minutes: float | None = field(default=None, metadata=_NOT_COMPARED)
    """Stop after so many minutes of training, all sittings together."""
    patience: int | None = field(default=None, metadata=_NOT_COMPARED)
    """Stop after so many evaluations without a better score."""
    best: Literal["bleu", "loss"] = "bleu"
    """What the best checkpoint is chosen by, on the first development corpus; BLEU is of greedy
    search."""
    evaluate_every: int = field(default=500, metadata=_NOT_COMPARED)
    """Steps between evaluations."""
    save_every: int = field(default=500, metadata=_NOT_COMPARED)
    """Steps between checkpoints."""
    log_every: int = field(default=20, metadata=_NOT_COMPARED)
    """Steps between lines of metrics."""
    keep: int = field(default=3, metadata=_NOT_COMPARED)
    """Newest checkpoints kept, beside the best one."""

    def _validate(self) -> None:
        self._require_positive("steps", "epochs", "minutes", "patience")
        self._require_positive("evaluate_every", "save_every", "log_every", "keep")
        self._require(0 <= self.seed < 2**32, "seed", "between 0 and 2^32 - 1")
        if self.steps is None and self.epochs is None and self.minutes is None:
            raise ValueError(
                "train.steps=None: name an end: train.steps, train.epochs or train.minutes"
            )


@dataclass(frozen=True)
class DecodeConfig(_Section):
    """How `translate` and `evaluate` search; evaluation in training is greedy."""

    beam: int = field(default=4, metadata=_NOT_COMPARED)
    """Hypotheses kept; 1: greedy."""
    penalty: Literal["gnmt", "power"] = field(default="gnmt", metadata=_NOT_COMPARED)
    """Length normalisation of a hypothesis of length L: ((5 + L) / 6)^alpha or L^alpha."""
    alpha: float = field(default=0.6, metadata=_NOT_COMPARED)
    """Exponent of the length normalisation; 0: none."""
    batch_tokens: int = field(default=4096, metadata=_NOT_COMPARED)
    """Source token slots in a batch, padding included, counted once for each hypothesis."""

    def _validate(self) -> None:
        self._require_positive("beam", "batch_tokens")
        self._require(self.alpha >= 0, "alpha", "at least 0")


@dataclass(frozen=True)
class ExecutionConfig(_Section):
    """How a run is executed: recorded, never compared, never needed to load it."""

    executor: Literal["jit", "pmap"] = field(default="jit", metadata=_NOT_COMPARED)
    """What compiles the training step for several devices."""
    kernel: str = field(default="auto", metadata=_NOT_COMPARED)
    """What computes soft and local-m attention of products in training: auto, reference, blockwise,
    xla, cudnn, pallas, or a function of yours, MODULE:FUNCTION."""


@dataclass(frozen=True)
class Config(_Section):
    """Everything that says what a run is."""

    model: ModelConfig = BASE
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig(steps=100_000)
    decode: DecodeConfig = DecodeConfig()
    execution: ExecutionConfig = ExecutionConfig()

    @classmethod
    def _name(cls) -> str:
        return ""

    def _validate(self) -> None:
        if self.model.tied == "all" and not self.tokenizer.joint:
            raise ValueError(
                "model.tied='all': must be decoder or none where tokenizer.joint=False: "
                "two vocabularies cannot share one matrix"
            )
        kernel, positions = self.execution.kernel, self.model.positions
        if positions in ("alibi", "relative") and kernel in ("blockwise", "pallas"):
            raise ValueError(
                f"execution.kernel={kernel!r}: must be auto, reference, xla or cudnn where "
                f"model.positions={positions!r}: it has no bias"
            )
        if self.model.attention_dropout and kernel in ("blockwise", "xla", "cudnn", "pallas"):
            raise ValueError(
                f"execution.kernel={kernel!r}: must be auto or reference where "
                f"model.attention_dropout={self.model.attention_dropout}: it has no dropout"
            )
        if self.model.cross_attention.kind == "hard" and self.data.packing:
            raise ValueError(
                "data.packing=True: must be false where model.cross_attention.kind='hard', "
                "whose reward is that of one sentence a row"
            )
        if self.model.labels is not None and self.data.packing:
            raise ValueError(
                f"data.packing=True: must be false where model.labels={self.model.labels}: "
                "rows of labels are short"
            )


def to_json(config: Any) -> dict[str, Any]:
    """The config as JSON values: dicts, lists, strings, numbers, booleans and None."""
    return _plain(dataclasses.asdict(config))


def from_json(value: Any, kind: type[Any] = Config, name: str = "") -> Any:
    """Reads a config back. ValueError: a key that no field has, or a value of another type."""
    if not isinstance(value, dict):
        raise ValueError(f"{name.rstrip('.') or 'config'}={value!r}: must be an object")
    hints = typing.get_type_hints(kind)
    for key in value:
        if key not in hints:
            raise ValueError(f"{name}{key}: unknown key{did_you_mean(key, hints)}")
    made = {
        key: from_json(item, hints[key], f"{name}{key}.")
        if dataclasses.is_dataclass(hints[key])
        else _convert(f"{name}{key}", item, hints[key])
        for key, item in value.items()
    }
    return kind(**made)


def differences(old: Config, new: Config) -> list[str]:
    """Fields in which two configs describe different runs, as "model.layers: 4 -> 6"."""
    return _differences(old, new, "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message on an unknown name: the nearest known one, or all of them."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"


def load_config_file(path: str | Path) -> Config:
    """Runs the Python file a user names and returns what its `get_config()` returns.

    ValueError: the file is missing, fails, or has no `get_config` that returns a `Config`.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"config file {path}: no such file")
    space: dict[str, Any] = {"__name__": "config", "__file__": str(path)}
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), space)
        config = space["get_config"]() if "get_config" in space else None
    except ValueError as error:
        raise ValueError(f"config file {path}: {error}") from error
    except Exception as error:
        raise ValueError(f"config file {path}: {type(error).__name__}: {error}") from error
    if "get_config" not in space:
        raise ValueError(f"config file {path}: defines no function get_config()")
    if not isinstance(config, Config):
        raise ValueError(f"config file {path}: get_config() must return a Config, not {config!r}")
    return config


def _differences(old: Any, new: Any, name: str) -> list[str]:
    found: list[str] = []
    for f in dataclasses.fields(old):
        a, b = getattr(old, f.name), getattr(new, f.name)
        if dataclasses.is_dataclass(a):
            found += _differences(a, b, f"{name}{f.name}.")
        elif a != b and f.metadata.get("compared", True):
            found.append(f"{name}{f.name}: {a!r} -> {b!r}")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
