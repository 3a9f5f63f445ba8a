"""Names shared by every package: the dimension legend, `Params`, `Key`, `Batch` and others.

Dimensions, in capitals in shapes and in lower case in einsum strings:

    B batch    S source length    T target length    D d_model    N heads    H head size
    F d_ff     V vocabulary       K beams            L layers     G KV heads
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Params = dict[str, Any]
"""The tree of parameters that `Module.init` returns under "params"."""

Key = jax.Array
"""A typed PRNG key (`jax.random.key`)."""

Size = Any
"""A number of elements: an int, or a symbolic dimension of `jax.export`."""

Hidden = Float[Array, "B T D"]
"""Hidden states at the positions of the target, or of either side."""

Memory = Float[Array, "B S D"]
"""The encoder's output."""

Heads = Float[Array, "B N T H"]
"""Queries of all heads, or what attention returns for them."""

KVHeads = Float[Array, "B G S H"]
"""Keys, or values, each of which serves a group of query heads."""

HostOrDeviceArray = Any
"""A NumPy array on the host or a `jax.Array` on devices; a batch is first one, then the other."""

Constrain = Callable[[Array, tuple[str | None, ...]], Array]
"""(array, the logical name of each dimension or None) -> the array, sharded by those names."""


def unconstrained(x: Array, names: tuple[str | None, ...]) -> Array:
    """Returns the array unchanged: the `Constrain` of a model that is not sharded."""
    return x


class Mean(NamedTuple):
    """A weighted mean in two parts, each of which adds over devices and microbatches."""

    total: Float[Array, ""]
    weight: Float[Array, ""]


class Outcome(NamedTuple):
    """The log-likelihood of each target token: what an auxiliary loss may depend on."""

    log_likelihood: Float[Array, "B T"]  # nats; 0 at padding
    is_token: Bool[Array, "B T"]  # False at padding
    averages: dict[str, Array]  # the running means of `TrainState.averages`


AuxiliaryLoss = Callable[[Outcome], Float[Array, ""]]
"""A loss that is added to the sum over target tokens. It is a `jax.tree_util.Partial`, a pytree."""


class Auxiliary(NamedTuple):
    """Values that a layer returns besides its output, by the names of layers and sub-layers."""

    losses: Mapping[str, AuxiliaryLoss] = {}
    metrics: Mapping[str, Float[Array, "B T"]] = {}  # one value per query
    weights: Mapping[str, Float[Array, "B N T S"]] = {}  # attention weights, if computed

    def within(self, scope: str) -> Auxiliary:
        """Returns the same values with `scope/` before each name."""
        return self._make({f"{scope}/{k}": v for k, v in values.items()} for values in self)

    def __or__(self, other: Auxiliary) -> Auxiliary:
        """Returns the values of both."""
        return self._make({**ours, **theirs} for ours, theirs in zip(self, other, strict=True))


class ModelOutput(NamedTuple):
    """Output of a model for a batch."""

    logits: Float[Array, "B T V"]
    losses: Mapping[str, AuxiliaryLoss]  # to be added to the loss, by layer
    metrics: dict[str, Mean]  # by layer and name
    weights: Mapping[str, Array]  # attention weights by layer, if its kernel or kind computes them


class LayerState(NamedTuple):
    """State of one layer of the decoder over the positions before, for K hypotheses a sentence."""

    cache: Any  # stays where it is and is found through the slots; leaves [B, ...]
    carry: Any  # is reordered by parent, such as a recurrent layer's vector; leaves [B, K, ...]

    def reordered(self, parents: Int[Array, "B K"]) -> LayerState:
        """Returns the state of hypotheses that continue those with the indices `parents`."""
        return self._replace(carry=take_beams(self.carry, parents))


class DecodeState(NamedTuple):
    """State that decoding carries from step to step."""

    cross_attention: tuple[Any, ...]  # each layer's keys and values of the memory; leaves [B, ...]
    source_segments: Int[Array, "B S"]  # 1 for tokens of the source, 0 for padding
    self_layers: tuple[LayerState, ...]
    slots: Int[Array, "B K T"]  # the cache's hypothesis that each hypothesis continues, by position

    def reordered(self, parents: Int[Array, "B K"]) -> DecodeState:
        """Returns the state of hypotheses that continue those with the indices `parents`."""
        layers = tuple(layer.reordered(parents) for layer in self.self_layers)
        return self._replace(self_layers=layers, slots=take_beams(self.slots, parents))


def take_beams(tree: Any, beams: Int[Array, "B C"]) -> Any:
    """Returns the hypotheses with these indices of each sentence, from arrays [B, K, ...]."""

    def take(x: Array) -> Array:
        return jnp.take_along_axis(x, beams.reshape(*beams.shape, *[1] * (x.ndim - 2)), axis=1)

    return jax.tree.map(take, tree)


def map_nodes(function: Callable[[Any], Any], kind: Any, tree: Any) -> Any:
    """Returns the tree with `function(node)` in place of each node of the type `kind`."""

    def is_node(x: Any) -> bool:
        return isinstance(x, kind)

    return jax.tree.map(lambda x: function(x) if is_node(x) else x, tree, is_leaf=is_node)


class Batch(NamedTuple):
    """A batch of sentence pairs as ids, padded with `PAD`.

    `target_in` is `target_out` shifted right by one, with `ModelConfig.start_id` in front. In a
    packed batch a row holds several pairs: `*_segments` number them from 1, with 0 for padding, and
    `*_positions` restart at 0 with each of them. Both are None where a row is one pair.
    """

    source: HostOrDeviceArray  # [B, S] int32
    target_in: HostOrDeviceArray  # [B, T] int32
    target_out: HostOrDeviceArray  # [B, T] int32
    source_segments: HostOrDeviceArray | None = None  # [B, S] int32
    source_positions: HostOrDeviceArray | None = None  # [B, S] int32
    target_segments: HostOrDeviceArray | None = None  # [B, T] int32
    target_positions: HostOrDeviceArray | None = None  # [B, T] int32
