"""The commands `attention` and `plot`, which write a page or a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import Attention, Plot
from transformer_jax.cli.common import load_translator, output_file, parse_layer
from transformer_jax.decoding.attention_view import attention_view
from transformer_jax.decoding.attention_weights import attention_weights, choose_view
from transformer_jax.errors import UserError
from transformer_jax.files import find_path, parse_json, write_whole
from transformer_jax.training.reporters import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".html", ".svg", ".png", ".pdf")
"""Formats that `attention` writes: a page, and pictures."""


def attention(options: Attention, arguments: ConfigArguments) -> None:
    """Writes the page or the picture.

    UserError: there are several runs or no such attention, layer or head, or the file cannot be
    written.
    """
    if len(options.run) > 1:
        raise UserError(f"--run: given {len(options.run)} times; name the run to look into")
    path = output_file(options.output)
    layer, head = parse_layer("--layer", options.layer) if options.layer else (None, None)
    if path.suffix not in SUFFIXES:
        raise UserError(
            f"--output={path}: unknown format; name a file that ends with {', '.join(SUFFIXES)}"
        )
    if path.suffix != ".html":
        require_matplotlib("attention")
    translator = load_translator(options, arguments)
    target = translator(options.sentence).text if options.target is None else options.target
    weights = attention_weights(translator, options.sentence, target)
    view = choose_view(weights, options.attention, layer, head)
    if path.suffix == ".html":
        write_whole(path, attention_view(weights, view))
        return
    from transformer_jax import plot

    rows, keys = weights.tokens(view.attention)
    heads = weights.layers[view.attention][view.layer]
    chosen = range(len(heads)) if view.head is None else [view.head]
    panels = {f"{view.attention} layer {view.layer}, head {i}": heads[i] for i in chosen}
    plot.save(plot.attention_maps(panels, keys, rows, columns=4), path)


def require_matplotlib(what: str) -> None:
    """UserError: matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"{what}: needs matplotlib; pip install 'transformer-jax[plot]'")


def plot(options: Plot) -> None:
    """Writes the picture. UserError: matplotlib is missing, or there is nothing to plot."""
    require_matplotlib("plot")
    from transformer_jax import plot

    path, several = output_file(options.output), len(options.sources) > 1
    curves: dict[str, Any] = {}
    figure = None
    for name in options.sources:
        records = _of_result(name) if name.endswith(".json") else _of_run(name)
        if isinstance(records, list):
            curves[Path(name).stem if several else ""] = records
        elif several:
            raise UserError(f"{name}: is no training; plot it alone")
        else:
            figure = records
    plot.save(figure or plot.training_curves(curves), path)


def _of_run(name: str) -> list[dict[str, Any]]:
    """Returns the records of a run's metrics. UserError: there is no run, or it has none."""
    folder = find_path(name)
    if not folder.is_dir():
        raise UserError(f"run {folder}: no such folder")
    records = read_metrics(folder / "metrics.jsonl")
    if not any(record["kind"] in ("train", "evaluation") for record in records):
        raise UserError(f"run {name}: has no metrics to plot yet; train it first")
    return records


def _of_result(name: str) -> list[dict[str, Any]] | Figure:
    """Returns the evaluations of a result, or the picture of one that holds other measurements."""
    from transformer_jax import plot
    from transformer_jax.benchmark.attention_report import curves

    path = Path(name)
    if not path.is_file():
        raise UserError(f"{name}: no such file")
    result = parse_json(path.read_bytes())
    try:
        match result:
            case {"evaluations": evaluations}:
                return [{"step": e["step"], **e} for e in evaluations]
            case {"curves": lines}:
                return plot.lines(**lines)
            case {"records": records}:
                return plot.scaling(curves(records))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{name}: is damaged: {error!r}") from error
    raise UserError(f'{name}: has nothing to plot: none of "evaluations", "curves" and "records"')
