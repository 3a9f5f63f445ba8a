"""Plots arrays and result files. Needs the extra `plot` (matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def training_curve(evaluations: Sequence[dict[str, Any]], axes: Axes | None = None) -> Axes:
    """Plots development loss and BLEU against steps; each evaluation has step, loss and bleu."""
    axes = axes or _new_axes((7.0, 3.2))
    steps = [e["step"] for e in evaluations]
    axes.plot(steps, [e["loss"] for e in evaluations], color="tab:blue", label="loss")
    axes.set_xlabel("step")
    axes.set_ylabel("development loss (nats a token)", color="tab:blue")
    right = axes.twinx()
    right.plot(steps, [e["bleu"] for e in evaluations], color="tab:orange", label="BLEU")
    right.set_ylabel("development BLEU (greedy)", color="tab:orange")
    axes.spines["top"].set_visible(False)
    right.spines["top"].set_visible(False)
    return axes


def attention_map(
    weights: np.ndarray, source: Sequence[str], target: Sequence[str], axes: Axes | None = None
) -> Axes:
    """Plots attention weights [T, S]: a row for each target token, a column for each source one."""
    axes = axes or _new_axes((0.5 * len(source) + 1, 0.4 * len(target) + 1))
    axes.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(source)), source, rotation=60, ha="right")
    axes.set_yticks(range(len(target)), target)
    return axes


def attention_maps(
    panels: dict[str, np.ndarray], source: Sequence[str], target: Sequence[str], columns: int = 3
) -> Axes:
    """Plots an `attention_map` for each title, all with the same tokens.

    Returns the axes of the first map.
    """
    rows = -(-len(panels) // columns)
    size = max(0.24 * len(source) + 0.3, 2.2), max(0.22 * len(target) + 0.4, 2.2)
    _, grid = plt.subplots(
        rows, columns, figsize=(size[0] * columns, size[1] * rows), squeeze=False, sharey=True
    )
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, (title, weights) in zip(grid.flat, panels.items(), strict=False):
        axes.set_axis_on()
        attention_map(weights, source, target, axes)
        axes.set_title(title)
        axes.label_outer()
    return grid[0, 0]


def scaling(panels: dict[str, dict[str, list[tuple[int, float]]]], x: str = "length") -> Axes:
    """Plots values on logarithmic axes: a panel per title, a line per name. `x` labels the x-axis.

    Returns the axes of the first panel.
    """
    _, grid = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.6), squeeze=False)
    for axes, (title, lines) in zip(grid.flat, panels.items(), strict=True):
        for name, points in lines.items():
            axes.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=name, base=2)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(x)
        if lines:
            axes.legend(fontsize=8, frameon=False)
    return grid[0, 0]


def by_pairs(lines: dict[str, list[tuple[int, float]]], axes: Axes | None = None) -> Axes:
    """Plots BLEU against the number of training pairs, on a logarithmic axis, a line per name."""
    axes = axes or _new_axes((5.0, 3.6))
    for name, points in lines.items():
        axes.semilogx(*zip(*points, strict=True), marker="o", markersize=4, label=name)
    axes.set_xlabel("training pairs")
    axes.set_ylabel("BLEU, cased, 13a")
    axes.legend(frameon=False)
    return axes


def save(axes: Axes, path: Path) -> None:
    """Writes the figure as SVG. The same figure always gives the same bytes."""
    with plt.rc_context({"svg.hashsalt": "transformer_jax", "svg.fonttype": "path"}):
        figure = axes.get_figure()
        assert isinstance(figure, Figure)
        figure.savefig(path, format="svg", metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def _new_axes(size: tuple[float, float]) -> Axes:
    return plt.subplots(figsize=size)[1]
