"""Implements the kinds of attention that a model's config can name, with their parameters."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float

from transformer_jax.attention import functional, scores
from transformer_jax.attention.functional import ContextAndWeights
from transformer_jax.attention.gathered import local_p_gathered
from transformer_jax.attention.masks import Mask, dense_mask
from transformer_jax.attention.reinforce import reinforce, reinforce_to_go
from transformer_jax.attention.scores import SCORES
from transformer_jax.config import AttentionConfig, look_up
from transformer_jax.errors import UserError
from transformer_jax.types import AuxiliaryLoss, Heads, Key, KVHeads, Size


class AttentionInputs(NamedTuple):
    """Inputs of a kind of attention."""

    query: Heads
    key: KVHeads  # G may be smaller than N
    value: KVHeads
    mask: Mask
    bias: Float[Array, "#B #N #T S"] | None  # added to the scores
    config: AttentionConfig
    max_length: int
    rng: Key | None  # for sampled choices in training; None: evaluation
    attend: Callable[..., ContextAndWeights]  # the layer's kernel, bias and dropout
    needs_weights: bool  # whether to return attention weights, even if that is slower
    last_layer: bool  # of a kind that only one layer has: whether it is the last of its stack
    param: Callable[..., Any]  # (name, initializer, shape): a parameter

    def repeat_heads(self, x: KVHeads) -> Float[Array, "B N S H"]:
        """Returns keys or values repeated to the number of query heads."""
        return jnp.repeat(x, self.query.shape[1] // x.shape[1], axis=1)

    def dense_mask(self) -> Bool[Array, "#B 1 #T S"] | None:
        """Returns the mask as booleans."""
        return dense_mask(self.mask, self.query.shape[2], self.key.shape[2])

    def arguments(self) -> tuple[Array, Array, Array, Array | None]:
        """Returns queries, keys, values and mask as the functions of `functional` take them."""
        keys, values = self.repeat_heads(self.key), self.repeat_heads(self.value)
        return self.query, keys, values, self.dense_mask()

    def apply(self, function: Callable[..., ContextAndWeights], **options: Any) -> Any:
        """Returns the output of a function of `functional`, with the config's score."""
        return AttentionOutput(*function(*self.arguments(), score=self.score, **options))

    def matrix(self, name: str, *shape: int) -> Array:
        """Returns a learned matrix for each head, [N, H, *shape]; without `shape` [N, H, H]."""
        _, heads, _, width = self.query.shape
        init = nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
        return self.param(name, init, (heads, width, *(shape or (width,))))

    def vector(self, name: str) -> Array:
        """Returns a learned vector for each head, [N, H]."""
        _, heads, _, width = self.query.shape
        return self.param(name, nn.initializers.normal(width**-0.5), (heads, width))

    def prepare(self, query: Array, keys: Array) -> tuple[Array, Array]:
        """Returns queries and keys as `comparison` takes them, with the score's parameters applied.

        These are applied once per query and once per key, not once per pair.
        """
        score = SCORES[self.config.score]
        _, positions = self.mask.positions(query.shape[2], keys.shape[2])
        return score.prepare(query, keys, positions, **self._parameters(score.params))

    def comparison(self) -> Partial:
        """Returns the function that scores prepared queries and keys, without the bias."""
        score = SCORES[self.config.score]
        return Partial(score.compare, **self._parameters(score.compare_params))

    def score(self, query: Array, keys: Array) -> Float[Array, "B N T S"]:
        """Returns the scores of the config's score function, plus the bias."""
        scores = self.comparison()(*self.prepare(query, keys))
        return scores if self.bias is None else scores + self.bias

    def _parameters(self, dimensions: Mapping[str, str]) -> dict[str, Array]:
        """Returns the parameters that a score declares, by name."""
        shapes = {"H H": (), "H P": (self.max_length,)}
        return {
            name: self.vector(name) if of == "H" else self.matrix(name, *shapes[of])
            for name, of in dimensions.items()
        }


class AttentionOutput(NamedTuple):
    """Output of a kind of attention."""

    context: Heads
    weights: Float[Array, "B N T S"] | None
    losses: Mapping[str, AuxiliaryLoss] = {}  # by name; added to the training loss
    metrics: Mapping[str, Float[Array, "B T"]] = {}  # by name, one per query; means are reported


@dataclass(frozen=True)
class Kind:
    """A kind of attention: its function and what it supports."""

    compute: Callable[[AttentionInputs], AttentionOutput]
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Roles that the kind cannot have, each with the reason. A role is a field of `ModelConfig`, or
    "label_attention": a classifier's `cross_attention`."""
    window: Literal["required", "optional", "none"] = "none"
    """Whether the config's `window`, the half-width D, applies to it."""
    score: bool = True
    """Whether its score function can be chosen."""
    one_layer: bool = False
    """Whether only one layer of a stack may be of this kind."""
    packing: bool = True
    """Whether it supports rows of several sentences."""
    dropout: bool = True
    """Whether it supports dropout of attention weights."""
    projections: bool = True
    """Whether queries, keys and values are learned projections; otherwise they are the inputs."""
    kernel_features: frozenset[str] = frozenset()
    """Features that it needs of the kernel, besides what the model's settings need."""


def soft(inputs: AttentionInputs) -> AttentionOutput:
    """Computes `functional.soft_attention`, with the layer's kernel for dot products."""
    if SCORES[inputs.config.score].product:
        query, key = inputs.prepare(inputs.query, inputs.key)
        return AttentionOutput(*inputs.attend(query, key, inputs.value, inputs.mask))
    return inputs.apply(functional.soft_attention)


def plain(inputs: AttentionInputs) -> AttentionOutput:
    """Computes `functional.plain_self_attention`: soft attention by dot products."""
    return soft(inputs._replace(config=replace(inputs.config, score="dot")))


def local_m(inputs: AttentionInputs) -> AttentionOutput:
    """Computes `functional.local_m_attention`: soft attention under a windowed mask."""
    return soft(inputs._replace(mask=replace(inputs.mask, window=inputs.config.window)))


def local_p(inputs: AttentionInputs) -> AttentionOutput:
    """Computes `functional.local_p_attention` around the position that each head predicts."""
    queries, keys = inputs.query.shape[2], inputs.key.shape[2]
    first, length = inputs.mask.sentences(queries, keys)
    w, v = inputs.matrix("center_w"), inputs.vector("center_v")
    lengths = length[:, None].astype(jnp.float32)
    center = functional.predicted_center(inputs.query, lengths, w, v)
    window = inputs.config.window or 0
    if _gathers(inputs, keys, window):
        prepared = inputs.prepare(inputs.query, inputs.repeat_heads(inputs.key))
        values, score = inputs.repeat_heads(inputs.value), inputs.comparison()
        context = local_p_gathered(
            *prepared, values, first, length, center=center, window=window, score=score
        )
        return AttentionOutput(context, None)
    _, positions = inputs.mask.positions(queries, keys)
    options = {"window": window, "key_positions": positions[:, None, None]}
    return inputs.apply(functional.local_p_attention, center=center, **options)


def _gathers(inputs: AttentionInputs, keys: Size, window: int) -> bool:
    """Returns whether gathering each query's window is possible and faster than all scores."""
    possible = not inputs.needs_weights and inputs.bias is None and not inputs.mask.causal
    needed = max(MIN_GATHERED_KEYS, MIN_WINDOWS * (2 * window + 1))
    return possible and isinstance(keys, int) and needed <= keys


MIN_GATHERED_KEYS, MIN_WINDOWS = 512, 32
"""Windows are gathered if there are at least 512 keys and at least 32 windows of keys.

Measured with 8 heads of 64, windows of 8 to 64 and batches of 1 and 8 on two cores of an AMD EPYC:
gathering then takes 0.3 to 0.9 of the time of scoring all keys; with 16 windows 0.6 to 1.4, with 8
up to 2."""


def hard(inputs: AttentionInputs) -> AttentionOutput:
    """Computes `functional.hard_attention` and, in training, the loss by which it learns."""
    query, keys, values, mask = inputs.arguments()
    weights = functional.masked_softmax(inputs.score(query, keys), mask)
    choice = functional.one_hot_choice(weights, inputs.rng)
    context = functional.weighted_sum(choice, values)
    if inputs.rng is None:
        return AttentionOutput(context, choice)
    log = jnp.log(jnp.maximum(weights, jnp.finfo(jnp.float32).tiny))
    chosen, entropy = jnp.sum(choice * log, axis=(1, 3)), -jnp.sum(weights * log, axis=(1, 3))
    config, surrogate = inputs.config, reinforce if inputs.last_layer else reinforce_to_go
    loss = Partial(surrogate, config.reward * chosen, config.entropy * entropy)
    return AttentionOutput(context, choice, {"reinforce": loss})


def gumbel(inputs: AttentionInputs) -> AttentionOutput:
    """Computes `functional.gumbel_attention`."""
    return inputs.apply(functional.gumbel_attention, key=inputs.rng)


def latent(inputs: AttentionInputs) -> AttentionOutput:
    """Computes `functional.latent_attention` with the active weights softmax(Vᵀk) of each head.

    Row i of the active weights is a distribution over positions, which applies if token i is
    indicative (Chen et al. 2016, section 3).
    """
    keys = inputs.repeat_heads(inputs.key)
    length = keys.shape[2]
    segments = inputs.mask.key_segments
    same_sentence = Mask(segments, key_segments=segments).dense(length, length)
    _, positions = inputs.mask.positions(length, length)
    v = inputs.matrix("active", inputs.max_length)
    active = functional.masked_softmax(scores.location(keys, positions[:, None], v), same_sentence)
    return inputs.apply(functional.latent_attention, active=active)


_SELF = ["encoder_attention", "decoder_attention"]
_CROSS = ["cross_attention", "label_attention"]
_LOCAL_M = {"label_attention": "labels have no position in the sentence"}
_LOCAL_P = {"decoder_attention": "a sentence's length is unknown while it is decoded"}
_HARD = dict.fromkeys(_SELF, "it can only be trained in one layer of cross_attention")
_LATENT = dict.fromkeys(_SELF, "its active weights need a whole sentence, as in cross_attention")
_PLAIN = dict.fromkeys(_CROSS, "it has no queries of its own")
"""Roles that kinds cannot have, with the reasons."""

KINDS: dict[str, Kind] = {
    "soft": Kind(soft),
    "local-m": Kind(local_m, _LOCAL_M, window="required", kernel_features=frozenset({"window"})),
    "local-p": Kind(local_p, _LOCAL_P, window="required", dropout=False),
    "hard": Kind(hard, _HARD, one_layer=True, packing=False, dropout=False),
    "gumbel": Kind(gumbel, dropout=False),
    "latent": Kind(latent, _LATENT, dropout=False),
    "plain": Kind(plain, _PLAIN, score=False, projections=False),
}
"""The kinds of attention by label."""


def register_kind(label: str, kind: Kind | Callable[[AttentionInputs], AttentionOutput]) -> None:
    """Registers a kind of your own under `label`: its function, or a `Kind` with what it supports.

    A function alone may have every choice of the config. UserError: another kind has the label.
    """
    kind = kind if isinstance(kind, Kind) else Kind(kind, window="optional")
    registered = KINDS.setdefault(label, kind)
    if inspect.unwrap(registered.compute) is not inspect.unwrap(kind.compute):
        raise UserError(f"kind {label!r}: is already the label of another kind of attention")


def find_kind(role: str, label: str) -> Kind:
    """Returns the kind of that label. UserError: it is unknown; the message names `role`."""
    return look_up(KINDS, label, f"model.{role}.kind")
