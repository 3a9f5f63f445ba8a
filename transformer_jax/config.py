"""The config of a run: frozen dataclasses that check their values and convert to and from JSON.

A config file is a Python file that defines `get_config() -> Config`. The resolved config is stored
in the run as JSON. `from_json` reads it and refuses unknown keys, naming the nearest known one.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import operator
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from transformer_jax.errors import UserError, is_unicode
from transformer_jax.special_ids import BOS, PAD

Entry = TypeVar("Entry")

BleuTokenizer = Literal["13a", "intl", "zh", "char", "none", "ja-mecab", "ko-mecab"]
"""sacreBLEU's tokenizers that need no download."""


class Bounds(NamedTuple):
    """What a number of the config must be: in words, and as a test."""

    want: str
    hold: Callable[[float], bool]


Count = Annotated[int, Bounds("above 0", lambda x: x > 0)]
Natural = Annotated[int, Bounds("at least 0", lambda x: x >= 0)]
Positive = Annotated[float, Bounds("above 0", lambda x: x > 0)]
NonNegative = Annotated[float, Bounds("at least 0", lambda x: x >= 0)]
Rate = Annotated[float, Bounds("at least 0 and below 1", lambda x: 0 <= x < 1)]


def _changeable(default: Any) -> Any:
    """Returns a field that a continued run may change: how long a run trains, how it is executed
    and how its outputs are searched."""
    return field(default=default, metadata={"compared": False})


_WANTED = {
    int: "a whole number",
    float: "a number",
    str: "Unicode text without NUL",
    bool: "true or false",
}


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Returns `value` as the type `hint`: a list as a tuple, an int as a float.

    UserError: `value` is of another type, a float that is not finite, an int of more than 32 bits,
    or out of its bounds.
    """
    origin = get_origin(hint)
    if origin is Annotated:
        kind, bounds = get_args(hint)
        number = _convert(name, value, kind)
        if not bounds.hold(number):
            raise UserError(f"{name}={number!r}: must be {bounds.want}")
        return number
    if origin is Literal:
        if value in get_args(hint):
            return value
        choices = [str(choice) for choice in get_args(hint)]
        raise UserError(f"{name}={value!r}: must be one of {', '.join(choices)}")
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _convert(name, value, get_args(hint)[0])
    if origin is tuple:
        items = get_args(hint)
        if not isinstance(value, list | tuple):
            raise UserError(f"{name}={value!r}: must be a list")
        if items[-1] is not Ellipsis and len(value) != len(items):
            raise UserError(f"{name}={value!r}: must have {len(items)} items")
        return tuple(_convert(name, item, items[0]) for item in value)
    if hint is float and type(value) in (int, float):
        if abs(value) < 2.0**128:  # the end of float32, and of what is computed with it
            return float(value)
        raise UserError(f"{name}={value!r}: must be a finite number, below 2^128")
    is_bad_text = isinstance(value, str) and ("\0" in value or not is_unicode(value))
    if type(value) is not hint or is_bad_text:
        raise UserError(f"{name}={value!r}: must be {_WANTED.get(hint, f'a {hint.__name__}')}")
    low, high = (0, 32) if name.endswith("seed") else (-(2**31), 31)  # what JAX can take
    if isinstance(value, int) and not low <= value < 2**high:
        raise UserError(f"{name}={value}: must be at least {low} and below 2^{high}")
    return value


class _Section:
    """Base class of the parts of the config. Checks the values when an instance is made."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self), include_extras=True)
        for f in dataclasses.fields(typing.cast(Any, self)):
            value = _convert(f"{self._name()}{f.name}", getattr(self, f.name), hints[f.name])
            object.__setattr__(self, f.name, value)
        self._validate()

    @classmethod
    def _name(cls) -> str:
        """Returns the prefix of the fields in messages, such as "model." for `ModelConfig`."""
        return cls.__name__.removesuffix("Config").lower() + "."

    def _validate(self) -> None:
        pass

    def require(self, ok: bool, name: str, want: str) -> None:
        """Raises UserError, unless `ok`, for the field `name`, which may be one of a part, such as
        "cross_attention.window"."""
        if not ok:
            value = operator.attrgetter(name)(self)
            raise UserError(f"{self._name()}{name}={value!r}: must be {want}")


@dataclass(frozen=True)
class AttentionConfig(_Section):
    """One of the model's three attentions: how the attention weights are computed."""

    kind: str = "soft"
    """Kind of attention: soft (over all keys, as in the paper), local-m, local-p, hard, gumbel,
    latent, plain, or the label of a kind of your own."""
    score: str = "scaled_dot"
    """Score of a query and a key: scaled_dot (the paper's, section 3.2.1), dot, general, additive,
    location, or the label of your own."""
    window: int | None = None
    """Number of positions on each side of the center of a window (D), for the local kinds."""
    layer: int | None = None
    """Index of the only layer of the stack that has this kind, the others being soft; None: all
    layers have it."""
    entropy: float = 0.01
    """Weight of the entropy bonus of hard attention (λ_e of Xu et al. 2015, section 4.1)."""
    reward: float = 0.1
    """Weight of the REINFORCE term of hard attention (λ_r there)."""

    @classmethod
    def _name(cls) -> str:
        return "model.*_attention."


ROLES = ("encoder_attention", "decoder_attention", "cross_attention")
"""The model's attentions: fields of `ModelConfig`."""


@dataclass(frozen=True)
class ModelConfig(_Section):
    """The Transformer's architecture (Vaswani et al. 2017, section 3). Defaults: the base model."""

    labels: Count | None = None
    """Maximum number of labels of a sentence, for a model that classifies: each label is a target
    token with a query of its own in `cross_attention`. None: the model translates."""
    layers: int = 6
    """Number of encoder layers (N). 0 is allowed with labels only, which then attend to the
    embeddings."""
    decoder_layers: Count | None = None
    """Number of decoder layers (M); None: as many as encoder layers."""
    d_model: Count = 512
    """Width of the embeddings and of the output of every sub-layer."""
    heads: Count = 8
    """Number of attention heads; must divide d_model."""
    kv_heads: int | None = None
    """Number of KV heads (of keys and values), each shared by a group of query heads; must divide
    heads; None: as many as heads."""
    d_ff: Count = 2048
    """Width of the hidden layer of the feed-forward network."""
    max_length: int = 256
    """Maximum length of a sentence in tokens, end symbol included. Longer pairs are left out of
    training; longer lines are translated in parts. An output has at most
    max_length tokens."""
    norm: Literal["post", "pre"] = "post"
    """Layer normalization after each residual sum, as in the paper (post), or before each sub-layer
    (pre)."""
    norm_eps: Positive = 1e-6
    """Added to the variance in layer normalization."""
    positions: Literal["sinusoidal", "learned", "rotary", "alibi", "relative", "none"] = (
        "sinusoidal"
    )
    """Position encoding: added to the embeddings (section 3.5: sinusoidal, learned), or within
    self-attention (rotary, alibi, relative), or none."""
    position_layout: Literal["interleaved", "halves"] = "interleaved"
    """Sine and cosine in alternating columns, as in the paper (interleaved), or in two halves."""
    position_wavelengths: Literal["paper", "marian"] = "paper"
    """Wavelengths of the sinusoids i = 0 to D/2 - 1: 2π · 10000^(2i/D), as in the paper (paper), or
    2π · 10000^(i/(D/2 - 1)), as in Marian, Tensor2Tensor and fairseq (marian)."""
    activation: str = "relu"
    """Hidden layer of the feed-forward network: relu (as in the paper), gelu (the exact one),
    quick_gelu (x σ(1.702 x)), silu or swiglu (silu with a gate), or the label of your own."""
    tied: Literal["all", "decoder", "none"] = "all"
    """What shares one matrix: both embeddings and the logits (all), the target embeddings and the
    logits (decoder), nothing (none). With all, both sides also share learned positions."""
    bias: bool = True
    """Whether attention projections and the feed-forward network have biases."""
    output_bias: bool = False
    """Whether the logits have a bias."""
    embedding_scale: Positive | None = None
    """Factor that scales the embeddings; None: the square root of d_model (section 3.4)."""
    decoder_start_id: Natural | None = BOS
    """First id of the decoder's input; by default the begin symbol. None: it has no embedding, and
    the decoder begins with a vector of zeros plus position 0, as in Marian."""
    dropout: Rate = 0.1
    """Dropout rate of sub-layer outputs and of embeddings (section 5.4)."""
    encoder_attention: AttentionConfig = AttentionConfig()
    """The encoder's self-attention."""
    decoder_attention: AttentionConfig = AttentionConfig()
    """The decoder's self-attention."""
    cross_attention: AttentionConfig = AttentionConfig()
    """The decoder's attention over the encoder's output."""
    self_layer: str = "attention"
    """The decoder's sub-layer that sees earlier positions: attention (self-attention, as in the
    paper), ssru (the simpler simple recurrent unit of Kim et al. 2019, whose decoding is faster),
    or the label of a layer of your own."""
    attention_dropout: Rate = 0.0
    """Dropout rate of attention weights."""
    ffn_dropout: Rate = 0.0
    """Dropout rate of the hidden layer of the feed-forward network."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation; parameters, softmax, logits and loss remain float32."""
    weights: Literal["float32", "int8"] = "float32"
    """Type of the stored matrices. Those of `export --format int8` are int8, and are not trained
    further."""

    def _validate(self) -> None:
        if self.labels is None:
            self.require(self.layers > 0, "layers", "above 0")
        else:
            self._validate_classifier()
        self.require(self.max_length >= 2, "max_length", "at least 2 (a token and the end symbol)")
        divisors = (n for n in range(1, self.d_model + 1) if self.d_model % n == 0)
        nearest = min(divisors, key=lambda n: abs(n - self.heads))
        want = f"a divisor of model.d_model={self.d_model}, such as {nearest}"
        self.require(self.d_model % self.heads == 0, "heads", want)
        groups = self.kv_heads is None or (self.kv_heads > 0 and self.heads % self.kv_heads == 0)
        self.require(groups, "kv_heads", f"a divisor of model.heads={self.heads}")
        even = self.positions != "sinusoidal" or self.d_model % 2 == 0
        self.require(even, "d_model", "even for sinusoidal positions")
        even = self.positions != "rotary" or self.head_size % 2 == 0
        self.require(even, "d_model", f"an even multiple of model.heads={self.heads} for rotary")
        for role in ROLES:
            self._validate_attention(role)

    def _validate_classifier(self) -> None:
        self.require(self.layers >= 0, "layers", "at least 0")
        self.require(self.tied == "none", "tied", "none where model.labels is set")
        of_decoder = ("decoder_layers", "decoder_attention", "self_layer")
        missing = [(name, "decoder") for name in of_decoder]
        if self.layers == 0:
            missing.append(("encoder_attention", "encoder layer"))
            outside = self.positions in ("sinusoidal", "learned", "none")
            self.require(outside, "positions", "sinusoidal, learned or none where model.layers=0")
        for name, part in missing:
            left_out = getattr(self, name) == getattr(ModelConfig, name)
            self.require(left_out, name, f"left out where the model has no {part}")

    def _validate_attention(self, role: str) -> None:
        """Checks the ranges of an attention's fields; `check_model` checks those of its kind."""
        attention: AttentionConfig = getattr(self, role)
        layer, window, depth = attention.layer, attention.window, self.depth_of(role)
        self.require(window is None or window > 0, f"{role}.window", "at least 1")
        within = layer is None or 0 <= layer < depth
        self.require(within, f"{role}.layer", f"from 0 to {depth - 1}")
        self.require(attention.entropy >= 0, f"{role}.entropy", "at least 0")
        self.require(attention.reward > 0, f"{role}.reward", "above 0")

    @property
    def head_size(self) -> int:
        """Width of a head (H)."""
        return self.d_model // self.heads

    @property
    def start_id(self) -> int:
        """Id that the decoder reads first; without `decoder_start_id` `PAD`, embedded as zeros."""
        return PAD if self.decoder_start_id is None else self.decoder_start_id

    @property
    def depths(self) -> tuple[int, int]:
        """Numbers of encoder and decoder layers; the cross-attention of labels counts as one."""
        return self.layers, (self.decoder_layers or self.layers) if self.labels is None else 1

    @property
    def max_targets(self) -> int:
        """Greatest number of target tokens, end symbol included."""
        return self.max_length if self.labels is None else self.labels + 1

    def depth_of(self, role: str) -> int:
        """Returns the number of layers of the stack that has the attention `role`."""
        return self.depths[0 if role == "encoder_attention" else 1]

    def of_layer(self, layer: int) -> ModelConfig:
        """Returns the config of layer `layer` of each stack, counted from 0.

        It has the kinds of attention of that layer alone, so that layers that are alike have equal
        configs.
        """
        elsewhere = [r for r in ROLES if getattr(self, r).layer not in (None, layer)]
        return dataclasses.replace(self, **dict.fromkeys(elsewhere, AttentionConfig()))


TINY = ModelConfig(layers=4, d_model=128, heads=4, d_ff=256, dropout=0.3)
"""A model for corpora of about 30,000 pairs (Wu et al. 2021)."""
SMALL = ModelConfig(layers=3, d_model=256, heads=4, d_ff=1024, dropout=0.3)
"""A model for corpora of about 100,000 pairs."""
BASE = ModelConfig()
"""The paper's base model (table 3)."""
BIG = ModelConfig(d_model=1024, heads=16, d_ff=4096, dropout=0.3)
"""The paper's big model (table 3)."""


@dataclass(frozen=True)
class TokenizerConfig(_Section):
    """The tokenizer: SentencePiece models that are trained with the model or given by path."""

    kind: Literal["bpe", "unigram", "word"] = "bpe"
    """Kind of SentencePiece model to train. For word models, words that are not in the training
    data are unknown."""
    vocabulary: int = 8000
    """Number of ids of a trained model, including the special ids and the 256 of the byte fallback.
    Word models have no byte fallback and may have fewer ids."""
    joint: bool = True
    """Whether both languages share one vocabulary; otherwise each has its own."""
    symbols: tuple[str, ...] = ()
    """Strings that are always one token, such as placeholders."""
    sampling: NonNegative = 0.0
    """Subword sampling in training; 0: off. BPE: the probability, below 1, of skipping a merge
    (BPE-dropout). Unigram: alpha, the exponent of the probability of a segmentation; smaller values
    are more random, and 0.01 is nearly uniform. A sentence with an unknown token keeps its ids, and
    so does a pair whose sample is longer than the longest sentence of its side."""
    models: tuple[str, ...] = ()
    """Paths of your own SentencePiece models: one for both languages, or source and target. Their
    kinds, not tokenizer.kind, determine how subwords are sampled; they have their own number of ids
    and their own symbols."""

    def _validate(self) -> None:
        self.require(self.vocabulary > 260, "vocabulary", "above 260 (4 special ids, 256 bytes)")
        whole = self.kind == "word" and not self.models
        self.require(not whole or self.sampling == 0, "sampling", "0 for tokenizer.kind=word")
        merges = self.kind == "bpe" and not self.models
        self.require(not merges or self.sampling < 1, "sampling", "below 1 for tokenizer.kind=bpe")
        self.require(len(self.models) <= 2, "models", "one path, or two (source, target)")
        fits = not self.models or (len(self.models) == 1) == self.joint
        want = "one path" if self.joint else "two paths"
        self.require(fits, "models", f"{want} when tokenizer.joint={self.joint}")
        self.require(all(self.symbols), "symbols", "non-empty strings")
        own = bool(self.models and self.symbols)  # a model is not changed
        self.require(not own, "symbols", "empty when tokenizer.models names models of your own")


@dataclass(frozen=True)
class DataConfig(_Section):
    """The corpora, and how their pairs of sentences are batched.

    A corpus is `grammar` or `recipes` (built in), `SOURCE,TARGET` (two text files), `FILE.tsv` or
    `FILE.jsonl`; each file may be compressed (`.gz`, `.xz`, `.bz2`).
    """

    train: tuple[str, ...] = ("grammar",)
    """Corpora to train on."""
    dev: tuple[str, ...] = ("grammar",)
    """Development corpora; the score on the first one selects the best checkpoint."""
    weights: tuple[float, ...] | None = None
    """Weight of each corpus to train on: the fraction of all pairs that are drawn from it. An
    epoch has as many pairs as all corpora but those of weight 0. None: each pair once an epoch."""
    temperature: Positive | None = None
    """In place of weights: a corpus of N pairs is drawn in proportion to N^(1 / temperature). 1: as
    often as it has pairs; larger: small corpora more often."""
    fields: tuple[str, str] = ("source", "target")
    """Names of the source and the target field of a JSONL line."""
    max_ratio: Annotated[float, Bounds("at least 1", lambda x: x >= 1)] = 9.0
    """Training leaves out pairs whose numbers of tokens differ by more than this factor."""
    batch_tokens: Count = 4096
    """Number of tokens on each side of a batch, padding included."""
    shapes: Count = 8
    """Maximum number of batch shapes; each one is a compiled program."""
    packing: bool = False
    """Whether to pack several pairs into one row; all batches then have one shape."""
    packed_length: Count = 128
    """Length of packed rows; at least that of the longest sentence."""
    workers: Count = _changeable(2)
    """Number of threads that tokenize. Subword sampling always runs in one thread."""
    cache: str = _changeable("")
    """Folder of cached tokenizers and tokenized corpora; empty: the user's cache folder. Only
    training uses the folder that is stored in a run."""

    def _validate(self) -> None:
        if self.weights is not None:
            self.require(self.temperature is None, "temperature", "None where data.weights is set")
            count = len(self.train)
            self.require(len(self.weights) == count, "weights", f"{count}, one for each data.train")
            positive = min(self.weights) >= 0 and max(self.weights) > 0
            self.require(positive, "weights", "at least 0, and one of them above 0")
        self.require(all(self.fields), "fields", "two names")


@dataclass(frozen=True)
class OptimizerConfig(_Section):
    """The optimizer, its learning-rate schedule, and the processing of gradients (section 5.3)."""

    kind: str = "adam"
    """Adam (adam), as in the paper, or Muon (muon; Jordan et al. 2024) for the matrices of dense
    layers and Adam for the rest, or your own."""
    schedule: str = "noam"
    """Schedule of the learning rate after the linear warm-up: noam, inverse_sqrt, cosine,
    linear, or your own."""
    learning_rate: Positive = 1.0
    """Peak learning rate; for noam the factor of d_model^-0.5 · min(step^-0.5, step ·
    warmup^-1.5)."""
    warmup: Count = 4000
    """Number of steps of linear warm-up."""
    decay_steps: Count | None = None
    """Step at which the cosine and linear schedules reach 0; None for others."""
    b1: Rate = 0.9
    """Adam's decay of the first moment."""
    b2: Rate = 0.98
    """Adam's decay of the second moment."""
    eps: Positive = 1e-9
    """Adam's epsilon."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay (AdamW) of the matrices; with muon, of those of dense layers."""
    clip_norm: Positive | None = None
    """Maximum global norm of the gradient; None: no clipping."""
    label_smoothing: Rate = 0.1
    """Probability mass that label smoothing spreads over the vocabulary (section 5.4)."""
    r_drop: NonNegative = 0.0
    """Weight of R-Drop (α of Liang et al. 2021, formula 4); above 0, each pair is computed twice
    with different dropout."""
    accumulate: Count = 1
    """Number of microbatches whose gradients are accumulated in a step, to save memory."""
    microbatch_tokens: Count | None = _changeable(None)
    """In place of accumulate: maximum number of tokens on each side of a microbatch on one device.
    A step accumulates as many as data.batch_tokens takes on the devices there are."""
    ema: Annotated[float, Bounds("between 0 and 1", lambda x: 0 < x < 1)] | None = None
    """Decay of an exponential moving average of the parameters, which is then evaluated and saved;
    None: off."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained: encoder, decoder, embeddings, norms, cross_attention, or
    patterns of paths such as encoder/layers_0/*. A matrix that embeddings and logits share is one
    of the embeddings."""

    def _validate(self) -> None:
        derived = self.accumulate == 1 or self.microbatch_tokens is None
        self.require(derived, "accumulate", "1 where optimizer.microbatch_tokens is set")


@dataclass(frozen=True)
class TrainConfig(_Section):
    """When to stop training, evaluate, log and save."""

    seed: int = 0
    """Seed of initialization, batch order, dropout and subword sampling."""
    steps: Count | None = _changeable(None)
    """Number of updates after which to stop."""
    epochs: Count | None = _changeable(None)
    """Number of passes over the data after which to stop."""
    minutes: Positive | None = _changeable(None)
    """Minutes of training after which to stop, including those before an interruption."""
    patience: Count | None = _changeable(None)
    """Number of evaluations without a better score after which to stop; needs data.dev."""
    best: str = "bleu"
    """Score on the first development corpus that selects the best checkpoint: bleu or chrf (of
    greedy search), loss, or the name of the function of `train --metric`, which sets this field. Of
    equal scores, the one with the lower loss is better."""
    tokenize: BleuTokenizer = "13a"
    """sacreBLEU's tokenizer for BLEU, in training and in `evaluate`: zh or char for languages
    without spaces; ja-mecab and ko-mecab need packages (sacrebleu[ja], sacrebleu[ko])."""
    evaluate_every: Count = _changeable(500)
    """Number of steps between evaluations."""
    decode_every: Count | None = _changeable(1)
    """Number of evaluations of which one also translates; so does the one at train.steps, and one
    that is made because training ends earlier. Unless best is loss, the others count for neither
    best nor patience. None: none translates, which needs best=loss."""
    dev_lines: Count | None = None
    """Number of lines of each development corpus, the first ones, that are translated in training;
    None: all. The loss is that of all lines."""
    save_every: Count = _changeable(500)
    """Number of steps between checkpoints."""
    log_every: Count = _changeable(20)
    """Number of steps between records of metrics."""
    keep: Count = _changeable(3)
    """Number of newest checkpoints to keep, besides the best one. Training can continue from the
    newest two and the best one; the others keep the parameters only."""
    max_skipped: Count = _changeable(10)
    """Number of steps in a row after which to stop if the loss or the gradient of each is NaN or
    infinite. Such steps change no parameter."""

    def _validate(self) -> None:
        decodes = self.decode_every is not None or self.best == "loss"
        self.require(decodes, "decode_every", f"a number where train.best={self.best!r}, not loss")
        if self.steps is None and self.epochs is None and self.minutes is None:
            raise UserError("train.steps=None: set train.steps, train.epochs or train.minutes")


@dataclass(frozen=True)
class DecodeConfig(_Section):
    """The search of `translate` and `evaluate`; evaluation during training is greedy."""

    beam: Count = _changeable(4)
    """Beam size; 1: greedy search."""
    n_best: Count = _changeable(1)
    """Number of hypotheses of each line, or of samples."""
    penalty: Literal["gnmt", "power", "reward", "none"] = _changeable("gnmt")
    """Length penalty: the log probability of L tokens over ((5 + L) / 6)^alpha (gnmt) or L^alpha
    (power), plus alpha * L (reward), or as it is (none)."""
    alpha: NonNegative = _changeable(0.6)
    """Exponent of the length penalty, or the reward for each token; 0: the log probability as it
    is."""
    early_stopping: bool = _changeable(False)
    """Whether beam search stops once `beam` hypotheses have ended, as in most toolkits; otherwise
    once no other can be among the n best."""
    lookahead: bool = _changeable(True)
    """Without early_stopping: whether a hypothesis that has not ended counts as what it can become
    when it is longer; otherwise as it is, as in Hugging Face's transformers."""
    sample: bool = _changeable(False)
    """Whether to draw tokens at random instead of searching for the best."""
    temperature: Positive = _changeable(1.0)
    """Divisor of the log probabilities of samples; below 1: likelier ones."""
    top_k: Count | None = _changeable(None)
    """Number of likeliest tokens that samples are drawn from; None: all."""
    top_p: float | None = _changeable(None)
    """Probability of the likeliest tokens that samples are drawn from; None: all."""
    seed: int = _changeable(0)
    """Seed of samples, which also depend on the number of the line."""
    min_length: Natural = _changeable(0)
    """Least number of tokens, without the end symbol."""
    min_ratio: NonNegative = _changeable(0.0)
    """Least number of tokens for each source token."""
    max_length: Count | None = _changeable(None)
    """Greatest number of tokens, end symbol included; None: model.max_length."""
    max_ratio: Positive = _changeable(2.0)
    """Greatest number of tokens for each source token, besides 10 more."""
    no_repeat_ngrams: Count | None = _changeable(None)
    """Size of n-grams that an output may hold only once; None: any may be repeated."""
    repetition_penalty: Positive = _changeable(1.0)
    """Factor of the log probability of tokens that the output holds already."""
    suppress: tuple[str, ...] = _changeable(())
    """Pieces of the tokenizer that no output may hold, such as <unk>."""
    truncate: bool = _changeable(False)
    """Whether a line that is longer than the model is cut, with a warning; otherwise it is
    translated in parts."""
    batch_tokens: Count = _changeable(3072)
    """Number of source tokens in a batch, padding included, counted once for each hypothesis."""

    @property
    def hypotheses(self) -> int:
        """Number of hypotheses that a search extends for each line."""
        return self.n_best if self.sample else self.beam

    def _validate(self) -> None:
        found = self.sample or self.n_best <= self.beam
        self.require(found, "n_best", f"at most decode.beam={self.beam}")
        self.require(self.top_p is None or 0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        for name in ("temperature", "top_k", "top_p"):
            left_out = getattr(self, name) == getattr(DecodeConfig, name)
            self.require(self.sample or left_out, name, "left out without decode.sample=true")
        greatest = self.max_length
        within = greatest is None or self.min_length < greatest
        self.require(within, "min_length", f"below decode.max_length={greatest}")
        within = self.min_ratio <= self.max_ratio
        self.require(within, "min_ratio", f"at most decode.max_ratio={self.max_ratio}")


@dataclass(frozen=True)
class ExecutionConfig(_Section):
    """How training is executed: stored, but not compared and not needed to load the run."""

    executor: Literal["jit", "pmap"] = _changeable("jit")
    """JAX's transformation that compiles the training step for several devices."""
    kernel: str = _changeable("auto")
    """Kernel that computes soft, local-m and plain attention with dot-product scores in training:
    auto, reference, blockwise, xla, cudnn, pallas, or your own function, MODULE:FUNCTION."""
    deterministic: bool = _changeable(False)
    """Whether GPUs compute the same bits in every run, perhaps more slowly."""
    remat: Literal["none", "layers", "matmuls"] = _changeable("none")
    """What the backward pass computes again to save memory: nothing, all activations inside each
    layer (layers), or all but the results of matmuls (matmuls)."""
    peak_tflops: Positive | None = _changeable(None)
    """Peak of one device in TFLOP/s, for the utilization (MFU) that training reports; None: that of
    known TPUs and GPUs in bfloat16."""

    def _validate(self) -> None:
        compiled = self.executor == "jit" or not self.deterministic
        self.require(compiled, "deterministic", "False with execution.executor='pmap'")


@dataclass(frozen=True)
class MeshConfig(_Section):
    """The mesh of devices: stored, but not compared and not needed to load the run."""

    data: Annotated[int, Bounds("above 0, or -1", lambda x: x == -1 or x > 0)] = _changeable(-1)
    """Number of groups of devices that share the rows of a batch and hold copies of the model; -1:
    as many as there are devices for."""
    fsdp: Count = _changeable(1)
    """Number of devices that share the rows of a group and split its parameters and optimizer state
    (fully sharded data parallelism)."""
    tensor: Count = _changeable(1)
    """Number of devices over which heads, d_ff and vocabulary are split (tensor parallelism)."""


DATA_PARALLEL = MeshConfig()
"""The default mesh: all devices share the rows, and each holds a copy of the model."""


@dataclass(frozen=True)
class Config(_Section):
    """The config of a run."""

    model: ModelConfig = BASE
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig(steps=100_000)
    decode: DecodeConfig = DecodeConfig()
    execution: ExecutionConfig = ExecutionConfig()
    mesh: MeshConfig = DATA_PARALLEL

    @classmethod
    def _name(cls) -> str:
        return ""

    def changed(self, **sections: dict[str, Any]) -> Config:
        """Returns the config with fields of its sections changed, as `model={"layers": 2}`."""
        parts = {name: getattr(self, name) for name in sections}
        changed = {n: dataclasses.replace(part, **sections[n]) for n, part in parts.items()}
        return dataclasses.replace(self, **changed)

    def _validate(self) -> None:
        model, r_drop = self.model, self.optimizer.r_drop
        shares = self.tokenizer.joint or model.tied != "all"
        reason = "where tokenizer.joint=False: two vocabularies cannot share one matrix"
        self.require(shares, "model.tied", f"decoder or none {reason}")
        dropped = model.dropout or model.attention_dropout or model.ffn_dropout
        want = "0 where model.dropout=0: it compares predictions under different dropout"
        self.require(not r_drop or dropped > 0, "optimizer.r_drop", want)


def to_json(config: Any) -> dict[str, Any]:
    """Returns a config as JSON values: dicts, lists, strings, numbers, booleans and None."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json(value: Any, kind: type[Any] = Config, name: str = "") -> Any:
    """Returns the config that JSON values describe.

    UserError: a key is unknown, or a value is not allowed.
    """
    if not isinstance(value, dict):
        raise UserError(f"{name.rstrip('.') or 'config'}={value!r}: must be an object")
    hints = typing.get_type_hints(kind)
    for key in value:
        if key not in hints:
            raise UserError(f"{name}{key}: unknown key{did_you_mean(key, hints)}")
    values = {
        key: from_json(item, hints[key], f"{name}{key}.")
        if dataclasses.is_dataclass(hints[key])
        else _convert(f"{name}{key}", item, hints[key])
        for key, item in value.items()
    }
    return kind(**values)


def differences(old: Config, new: Config, *, all_fields: bool = False) -> list[str]:
    """Returns the fields in which two configs describe different runs: "model.layers: 4 -> 6".

    all_fields: also those that a continued run may change.
    """
    changed = _changed_fields(old, new)
    return [f"{n}: {a!r} -> {b!r}" for n, a, b, compared in changed if all_fields or compared]


def describe(config: Config) -> list[str]:
    """Returns a line for each section with the fields that differ from the defaults."""
    sections: dict[str, list[str]] = {}
    for name, _, value, _ in _changed_fields(Config(), config):
        section, _, field = name.partition(".")
        sections.setdefault(section, []).append(f"{field}={value!r}")
    return [f"{section:<12}{'  '.join(fields)}" for section, fields in sections.items()]


def require_decided(origin: str, run: Config, config: Config, free: Collection[str] = ()) -> None:
    """UserError: a config differs from that of a run in what its parameters and tokenizers decide.

    origin: names the run. Rates of dropout and sampling may differ, the type of the computation,
    the attentions and, unless positions are learned, the greatest length. free: fields of the
    section `model`, or "tokenizer" for that section, that may differ, too.
    """
    learned = run.model.positions == "learned"
    free = [*free] if learned else [*free, "max_length"]
    changed = _changed_fields(_decided(run, free), _decided(config, free))
    if wrong := [f"{name}={b!r}: must be {a!r}" for name, a, b, _ in changed]:
        raise UserError(f"{origin}: its parameters and tokenizers decide {'; '.join(wrong)}")


def _decided(config: Config, free: Collection[str]) -> Config:
    """Returns a config that keeps only what the parameters and tokenizers of a run decide, without
    the fields `free`."""
    model, default = config.model, ModelConfig()
    decoder_layers = model.depths[1] if model.labels is None else None
    values: Any = {"decoder_layers": decoder_layers, "kv_heads": model.kv_heads or model.heads}
    names = {*ROLES, "dropout", "attention_dropout", "ffn_dropout", "dtype", *free} - {"tokenizer"}
    values |= {name: getattr(default, name) for name in names}
    kept = TokenizerConfig() if "tokenizer" in free else config.tokenizer
    tokenizer = dataclasses.replace(kept, sampling=0.0)
    return Config(model=dataclasses.replace(model, **values), tokenizer=tokenizer)


def _changed_fields(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any, bool]]:
    """Yields the name of each field that differs, both values, and whether it is compared."""
    for f in dataclasses.fields(old):
        a, b = getattr(old, f.name), getattr(new, f.name)
        if dataclasses.is_dataclass(a):
            yield from _changed_fields(a, b, f"{name}{f.name}.")
        elif a != b:
            yield f"{name}{f.name}", a, b, f.metadata.get("compared", True)


def look_up(table: Mapping[str, Entry], name: str, field: str) -> Entry:
    """Returns the entry of a table to which users can add. UserError: it is unknown; the message
    names the field of the config."""
    if name not in table:
        hint = f"{did_you_mean(name, table)}; one of your own needs --import MODULE"
        raise UserError(f"{field}={name!r}: unknown{hint}")
    return table[name]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns the end of a message on an unknown name: the nearest known name, or all of them."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(names)}"


CONFIGS = Path(__file__).with_name("configs")
"""Folder of the config files that can be named without a path: in a checkout, a link to those at
its top."""


def load_config_file(path: str | Path) -> Config:
    """Executes a Python file and returns the result of its `get_config()`.

    path: with a "/" or ending in .py; else the name of a config of this project, as "quickstart".
    UserError: the file is missing, is no Python, raises, or has no `get_config` that returns a
    `Config`.
    """
    path = _by_name(str(path))
    if path.suffix.lower() not in (".py", ""):  # which could hold calls, such as JSON
        raise UserError(f"config file {path}: is not executed; name a Python file, FILE.py")
    if path.is_dir():
        raise UserError(f"config file {path}: is a folder; name a Python file")
    if not path.exists():
        raise UserError(f"config file {path}: no such file")
    space: dict[str, Any] = {"__name__": "config", "__file__": str(path)}
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), space)
        config = space["get_config"]() if "get_config" in space else None
    except ValueError as error:
        raise UserError(f"config file {path}: {error}") from error
    except Exception as error:
        raise UserError(f"config file {path}: {type(error).__name__}: {error}") from error
    if "get_config" not in space:
        raise UserError(f"config file {path}: defines no function get_config()")
    if not isinstance(config, Config):
        raise UserError(f"config file {path}: get_config() must return a Config, not {config!r}")
    return config


def _by_name(name: str) -> Path:
    """Returns the path of a config. UserError: it is a name, and not one of this project's."""
    if "/" in name or name.lower().endswith((".py", ".json")):
        return Path(name)
    names = sorted(path.stem for path in CONFIGS.glob("*.py"))
    if name not in names:
        raise UserError(f"config {name!r}: unknown, and no FILE.py; known: {', '.join(names)}")
    return CONFIGS / f"{name}.py"
