"""The command `attention`."""

from __future__ import annotations

from pathlib import Path

from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import Attention
from transformer_jax.cli.common import (
    load_translator,
    output_file,
    parse_layer,
    require_matplotlib,
)
from transformer_jax.decoding.attention_view import attention_view
from transformer_jax.decoding.attention_weights import (
    SentenceWeights,
    View,
    attention_weights,
    choose_view,
)
from transformer_jax.errors import UserError
from transformer_jax.files import write_whole

PICTURES = (".svg", ".png", ".pdf")


def run(options: Attention, arguments: ConfigArguments) -> None:
    """Writes the page or the picture.

    UserError: there are several runs or no such attention, layer or head, or the file cannot be
    written.
    """
    if len(options.run) > 1:
        raise UserError(f"--run: given {len(options.run)} times; name the run to look into")
    path = output_file(options.output)
    layer, head = parse_layer("--layer", options.layer) if options.layer else (None, None)
    is_page = path.suffix == ".html"
    if not (is_page or path.suffix in PICTURES):
        known = ".html, " + ", ".join(PICTURES)
        raise UserError(f"--output={path}: unknown format; name a file that ends with {known}")
    if not is_page:
        require_matplotlib("attention")
    translator = load_translator(options, arguments)
    target = options.target
    if target is None:
        target = translator(options.sentence).text
    weights = attention_weights(translator, options.sentence, target)
    view = choose_view(weights, options.attention, layer, head)
    if is_page:
        with write_whole(path) as file:
            file.write(attention_view(weights, view))
    else:
        _draw(weights, view, path)


def _draw(weights: SentenceWeights, view: View, path: Path) -> None:
    """Writes the attention maps of the heads."""
    from transformer_jax import plot

    rows, keys = weights.tokens(view.attention)
    heads = weights.layers[view.attention][view.layer]
    chosen = range(len(heads)) if view.head is None else [view.head]
    panels = {f"{view.attention} layer {view.layer}, head {i}": heads[i] for i in chosen}
    plot.save(plot.attention_maps(panels, keys, rows, columns=4), path)
