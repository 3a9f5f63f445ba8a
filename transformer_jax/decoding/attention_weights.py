"""All attention weights of a trained model for a sentence and its translation."""

import re
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from transformer_jax.decoding.trained import TrainedModel
from transformer_jax.errors import UserError
from transformer_jax.models.quantization import dequantize
from transformer_jax.types import Batch

ATTENTIONS = {
    "encoder": r"encoder/(\d+)/self_attention",
    "decoder": r"decoder/(\d+)/self_attention",
    "cross": r"(?:decoder/(\d+)|labels)/cross_attention",
}
"""The model's attentions, with the names of their layers in `ModelOutput.weights`."""


class SentenceWeights(NamedTuple):
    """The attention weights for one pair of sentences."""

    source: list[str]  # its pieces, with the end symbol
    inputs: list[str]  # what the decoder reads: the start symbol and the target's pieces
    outputs: list[str]  # what it predicts from them: the target's pieces and the end symbol
    layers: dict[str, dict[int, Float[np.ndarray, "N T S"]]]  # by attention and layer

    def tokens(self, attention: str) -> tuple[list[str], list[str]]:
        """Returns the tokens of the queries, and those of the keys."""
        rows = self.source if attention == "encoder" else self.outputs
        return rows, self.inputs if attention == "decoder" else self.source


class View(NamedTuple):
    """Which attention weights of a sentence are shown first."""

    attention: str
    layer: int
    head: int | None  # None: all heads of the layer


def attention_weights(model: TrainedModel, source: str, target: str) -> SentenceWeights:
    """Returns the weights with which a model, or the first of an ensemble, reads a pair.

    UserError: the source is blank, a sentence is too long for the model, or no layer computes
    weights.
    """
    tokenizers, config = model.tokenizers, model.model.config
    if not tokenizers.source.encode(source):
        raise UserError("the sentence is blank; give one with words")
    ids, outputs = model.encode_pair(source, target)
    inputs = [config.start_id, *outputs[:-1]]
    batch = Batch(*(np.array([row], np.int32) for row in (ids, inputs, outputs)))
    network = model.model.clone(kernel="reference", shards=1)  # the kernel that computes weights
    params = dequantize(jax.tree.map(np.asarray, model.params))
    output: Any = jax.jit(network.apply)({"params": params}, jax.tree.map(jax.numpy.asarray, batch))
    layers: dict[str, dict[int, np.ndarray]] = {}
    for attention, pattern in ATTENTIONS.items():
        for name, weights in output.weights.items():
            if match := re.fullmatch(pattern, name):
                layers.setdefault(attention, {})[int(match[1] or 0)] = np.asarray(weights[0])
    if not layers:
        raise UserError("no layer of the model computes attention weights")
    pieces = tokenizers.source.pieces(ids), tokenizers.target.pieces(outputs)
    return SentenceWeights(pieces[0], tokenizers.target.pieces(inputs), pieces[1], layers)


def choose_view(
    weights: SentenceWeights,
    attention: str | None = None,
    layer: int | None = None,
    head: int | None = None,
) -> View:
    """Returns the view of these weights; by default the last layer of cross-attention.

    UserError: the model has no such attention, layer or head, or that computes no weights.
    """
    if attention is None:
        attention = "cross" if "cross" in weights.layers else next(iter(weights.layers))
    _require(attention, weights.layers, "attention")
    layers = weights.layers[attention]
    layer = max(layers) if layer is None else layer
    _require(layer, sorted(layers), f"{attention} attention: layer")
    if head is not None:
        _require(head, range(len(layers[layer])), f"{attention} attention, layer {layer}: head")
    return View(attention, layer, head)


def _require(value: str | int, choices: Collection[str | int], name: str) -> None:
    if value not in choices:
        names = ", ".join(map(str, choices))
        raise UserError(f"{name} {value}: does not exist or has no weights; must be one of {names}")
