"""The command `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_jax.cli.commands import Plot
from transformer_jax.cli.common import output_file, require_matplotlib
from transformer_jax.errors import UserError
from transformer_jax.files import find_path, parse_json
from transformer_jax.training.reporters import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run(options: Plot) -> None:
    """Writes the picture. UserError: matplotlib is missing, or there is nothing to plot."""
    require_matplotlib("plot")
    from transformer_jax import plot

    path = output_file(options.output)
    plot.save(_draw(options.sources), path)


def _draw(sources: Sequence[str]) -> Figure:
    """Returns the training curves of runs and of their results, or the lines of one result."""
    from transformer_jax import plot

    curves: dict[str, Any] = {}
    for name in sources:
        drawn = _of_run(name) if not name.endswith(".json") else _of_result(name)
        if not isinstance(drawn, list):
            if len(sources) > 1:
                raise UserError(f"{name}: is no training; plot it alone")
            return drawn
        curves[Path(name).stem if len(sources) > 1 else ""] = drawn
    return plot.training_curves(curves)


def _of_run(name: str) -> list[dict[str, Any]]:
    """Returns the records of a run's metrics. UserError: there is no run, or it has none."""
    folder = find_path(name)
    if not folder.is_dir():
        raise UserError(f"run {name}: no such folder")
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
    found = parse_json(path.read_bytes())
    if isinstance(found, dict):
        try:
            if "evaluations" in found:
                return [{"step": e["step"], **e} for e in found["evaluations"]]
            if "curves" in found:
                return plot.lines(**found["curves"])
            if "records" in found:
                return plot.scaling(curves(found["records"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{name}: is damaged: {error!r}") from error
    raise UserError(f'{name}: has nothing to plot: none of "evaluations", "curves" and "records"')
