"""An interactive view of attention weights: one HTML file that needs no network."""

import base64
import json
import math
from importlib.resources import files
from typing import Any

import numpy as np
from jaxtyping import Float

from transformer_jax.decoding.attention_weights import SentenceWeights, View, choose_view

MAX_TOKENS = 48
"""Number of tokens of each sentence that are shown at most."""

MAX_WEIGHTS = 300_000
"""Number of weights in a page, which then has less than 1 MB; of large models fewer tokens are
shown."""


def attention_view(weights: SentenceWeights, first: View | None = None) -> str:
    """Returns a page on which a reader chooses attention, layer, head and token.

    Sentences are shown as text, whatever they hold. Long ones are cut, and the page says so.
    first: what the page shows before the reader chooses; None: as `choose_view`.
    """
    heads = sum(len(each) for layers in weights.layers.values() for each in layers.values())
    limit = min(MAX_TOKENS, math.isqrt(MAX_WEIGHTS // heads))
    longest = max(len(weights.source), len(weights.outputs))
    note = f"Only the first {limit} of {longest} tokens are shown." if longest > limit else ""
    tokens = ("source", "inputs", "outputs")
    data: dict[str, Any] = {name: getattr(weights, name)[:limit] for name in tokens}
    data["layers"] = {
        attention: {str(i): _encoded(each[:, :limit, :limit]) for i, each in sorted(layers.items())}
        for attention, layers in weights.layers.items()
    }
    data["first"] = (first or choose_view(weights))._asdict()
    # "<" would end the element that holds the data, if a sentence has "</script>".
    text = json.dumps(data | {"note": note}, ensure_ascii=False).replace("<", "\\u003c")
    template = files("transformer_jax.decoding").joinpath("attention_view.html").read_text("utf-8")
    return template.replace("DATA", text, 1)


def _encoded(weights: Float[np.ndarray, "N T S"]) -> dict[str, Any]:
    """Returns the weights as 16-bit multiples of 1/65535 in base64, and their shape."""
    steps = np.round(weights * 65535).astype("<u2")
    return {"shape": weights.shape, "weights": base64.b64encode(steps.tobytes()).decode()}
