"""The kinds of attention that a model's config can name, with the parameters that each learns."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float

from transformer_jax.attention import kinds, scores
from transformer_jax.attention.gathered import local_p_gathered
from transformer_jax.attention.masks import Mask, dense_mask
from transformer_jax.config import AttentionConfig, did_you_mean
from transformer_jax.types import Key, Size


def _outside_a_layer(name: str, *_: Any) -> Any:
    raise ValueError(f"parameter {name!r}: there are parameters only in a layer of a model")


class Given(NamedTuple):
    """What a kind of attention has to work with."""

    query: Float[Array, "B N T H"]
    key: Float[Array, "B G S H"]  # of G heads, which may be fewer
    value: Float[Array, "B G S H"]
    mask: Mask
    bias: Float[Array, "#B N #T S"] | None  # added to the scores
    config: AttentionConfig
    max_length: int
    random: Key | None  # of choices in training; None: evaluation
    attend: Callable[..., tuple[Array, Array | None]]  # the layer's kernel, bias and dropout
    weights: bool  # whether they are wanted, whatever they cost
    param: Callable[..., Any] = _outside_a_layer  # (name, initializer, shape): a parameter

    def heads(self, x: Float[Array, "B G S H"]) -> Float[Array, "B N S H"]:
        """Keys or values, once for each of the query's heads."""
        return jnp.repeat(x, self.query.shape[1] // x.shape[1], axis=1)

    def dense(self) -> Bool[Array, "#B 1 #T S"] | None:
        """The mask as booleans."""
        return dense_mask(self.mask, self.query.shape[2], self.key.shape[2])

    def matrix(self, name: str, *shape: int) -> Array:
        """A parameter for each head, [N, H, ...] (without `shape`: [N, H, H])."""
        _, heads, _, width = self.query.shape
        init = nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
        return self.param(name, init, (heads, width, *(shape or (width,))))

    def vector(self, name: str) -> Array:
        """A parameter for each head, [N, H]."""
        _, heads, _, width = self.query.shape
        return self.param(name, nn.initializers.normal(width**-0.5), (heads, width))

    def score(self, query: Array, keys: Array) -> Float[Array, "B N T S"]:
        """The scores that the config asks for, and the bias."""
        query, keys, score = self.comparable(query, keys)
        found = score(query, keys)
        return found if self.bias is None else found + self.bias

    def comparable(self, query: Array, keys: Array) -> tuple[Array, Array, Partial]:
        """Each query and each key, ready to be compared, and the score that then compares them.

        So that what is learned is applied to each once, however many it is compared with.
        """
        name = self.config.score
        if name == "additive":
            w, u, v = self.matrix("w"), self.matrix("u"), self.vector("v")
            return query @ w, keys @ u, Partial(scores.added, v=v)
        if name == "location":
            _, positions = self.mask.positions(query.shape[2], keys.shape[2])
            by_position = self.matrix("positions", self.max_length).swapaxes(1, 2)
            places = jnp.moveaxis(jnp.take(by_position, positions, axis=1), 1, 0)
            return query, jnp.broadcast_to(places, keys.shape), Partial(scores.dot)
        return self.scaled_query(), keys, Partial(scores.scaled_dot)

    def scaled_query(self) -> Float[Array, "B N T H"]:
        """The query whose scaled dot product with a key is the score that the config asks for."""
        name, root = self.config.score, self.query.shape[-1] ** 0.5
        if name == "general":
            return (self.query @ self.matrix("w").astype(self.query.dtype)) * root
        return self.query * root if name == "dot" else self.query


class Choices(NamedTuple):
    """What the loss must know of sampled choices to train them (`loss.reinforce`).

    Both in nats, and weighted as the config says.
    """

    log_probability: Float[Array, "B T"]
    entropy: Float[Array, "B T"]


class Attended(NamedTuple):
    """What a kind of attention gives back."""

    context: Float[Array, "B N T H"]
    weights: Float[Array, "B N T S"] | None
    choices: Choices | None = None


LayerKind = Callable[[Given], Attended]


def soft(given: Given) -> Attended:
    """`kinds.soft_attention`, by the layer's kernel where the score is a product."""
    if given.config.score in ("additive", "location"):
        keys, values = given.heads(given.key), given.heads(given.value)
        found = kinds.soft_attention(given.query, keys, values, given.dense(), score=given.score)
        return Attended(*found)
    return Attended(*given.attend(given.scaled_query(), given.key, given.value, given.mask))


def local_m(given: Given) -> Attended:
    """`kinds.local_m_attention`."""
    return soft(given._replace(mask=given.mask.windowed(given.config.window or 0)))


def local_p(given: Given) -> Attended:
    """`kinds.local_p_attention` around the position that each head predicts."""
    queries, keys = given.query.shape[2], given.key.shape[2]
    first, length = given.mask.sentences(queries, keys)
    w, v = given.matrix("centre_w"), given.vector("centre_v")
    lengths = length[:, None].astype(jnp.float32)
    centre = kinds.predicted_centre(given.query, lengths, w, v)
    window, values = given.config.window or 0, given.heads(given.value)
    query, key = given.query, given.heads(given.key)
    if _gathers(given, keys, window):
        query, key, score = given.comparable(query, key)
        near = {"centre": centre, "window": window, "score": score}
        return Attended(local_p_gathered(query, key, values, first, length, **near), None)
    _, positions = given.mask.positions(queries, keys)
    found = kinds.local_p_attention(
        query,
        key,
        values,
        given.dense(),
        centre=centre,
        window=window,
        key_positions=positions[:, None, None],
        score=given.score,
    )
    return Attended(*found)


def _gathers(given: Given, keys: Size, window: int) -> bool:
    """Whether gathering each query's window takes less time than scoring all keys."""
    plain = not given.weights and given.bias is None and not given.mask.causal
    return plain and isinstance(keys, int) and max(GATHERED, RATIO * (2 * window + 1)) <= keys


GATHERED, RATIO = 512, 32
"""The keys from which windows are gathered, and the keys for each one of a window: measured with 8
heads of 64, windows of 8 to 64 and batches of 1 and 8 on two cores of an AMD EPYC. From there on
it takes 0.3 to 0.9 of the time of scoring all keys; with 16 of them 0.6 to 1.4, with 8 to 2."""


def hard(given: Given) -> Attended:
    """`kinds.hard_attention`, with what REINFORCE needs to train it."""
    weights = kinds.masked_softmax(given.score(given.query, given.heads(given.key)), given.dense())
    choice = kinds.one_hot_choice(weights, given.random)
    context = kinds.weighted_sum(choice, given.heads(given.value))
    log = jnp.log(jnp.maximum(weights, jnp.finfo(jnp.float32).tiny))
    chosen, entropy = jnp.sum(choice * log, axis=(1, 3)), -jnp.sum(weights * log, axis=(1, 3))
    choices = Choices(given.config.reward * chosen, given.config.entropy * entropy)
    return Attended(context, choice, None if given.random is None else choices)


def gumbel(given: Given) -> Attended:
    """`kinds.gumbel_attention`."""
    found = kinds.gumbel_attention(
        given.query,
        given.heads(given.key),
        given.heads(given.value),
        given.dense(),
        score=given.score,
        key=given.random,
    )
    return Attended(*found)


def latent(given: Given) -> Attended:
    """`kinds.latent_attention`, whose active weights are softmax(Vᵀk) of each head: given that a
    token is telling, a distribution over positions (Chen et al. 2016, section 3)."""
    keys = given.heads(given.key)
    length = keys.shape[2]
    same = given.mask.among_keys().dense(length, length)
    _, positions = given.mask.positions(length, length)
    v = given.matrix("active", given.max_length)
    active = kinds.masked_softmax(scores.location(keys, positions[:, None], v), same)
    found = kinds.latent_attention(
        given.query,
        keys,
        given.heads(given.value),
        given.dense(),
        active=active,
        score=given.score,
    )
    return Attended(*found)


_KINDS: dict[str, LayerKind] = {
    "soft": soft,
    "local-m": local_m,
    "local-p": local_p,
    "hard": hard,
    "gumbel": gumbel,
    "latent": latent,
    "plain": soft,
}


def register_kind(label: str, kind: LayerKind) -> None:
    """Makes a kind of your own known by `label`. ValueError: there is another one of that label."""
    if inspect.unwrap(_KINDS.setdefault(label, kind)) is not inspect.unwrap(kind):
        raise ValueError(f"kind {label!r}: is already the label of another kind of attention")


def find_kind(place: str, label: str) -> LayerKind:
    """The kind of that label; ValueError, naming the config's field `place`, if there is none."""
    if label not in _KINDS:
        raise ValueError(
            f"model.{place}.kind={label!r}: unknown{did_you_mean(label, _KINDS)}; a kind of your "
            f"own is named with --kind {label}=MODULE:FUNCTION"
        )
    return _KINDS[label]


class Weighing(nn.Module):
    """The parameters of one layer's kind of attention, and the kind."""

    kind: LayerKind

    @nn.compact
    def __call__(self, given: Given) -> Any:
        return self.kind(given._replace(param=self.param))
