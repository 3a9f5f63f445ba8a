"""Plots arrays and result files. Needs the extra `plot` (matplotlib).

Every function returns a new `Figure` and keeps no state. Text is gray on a transparent background,
which can be read on white and on black; colors are those of Okabe and Ito (2008), which
color-blind readers tell apart, and lines differ by their markers, too.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cycler import cycler
from jaxtyping import Float
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from transformer_jax.errors import UserError
from transformer_jax.files import replacing

Number = int | float

Points = Sequence[Sequence[Number]]
"""Points (x, y) of a line."""

Panels = Mapping[str, Mapping[str, Points]]
"""The lines of each panel: points by name, by title."""

GRAY = "#767676"
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")

MOST_TOKENS = 64
"""Number of tokens on each side of an attention map; more cannot be read."""

_STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), GRAY),
    "axes.edgecolor": GRAY,
    "axes.prop_cycle": cycler(color=COLORS) + cycler(marker=MARKERS),
    "axes.titlesize": 10,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def attention_map(
    weights: Float[np.ndarray, "T S"], source: Sequence[str], target: Sequence[str]
) -> Figure:
    """Plots attention weights: a row for each target token, a column for each source token."""
    return attention_maps({"": weights}, source, target, columns=1)


@rc_context(_STYLE)
def attention_maps(
    panels: Mapping[str, Float[np.ndarray, "T S"]],
    source: Sequence[str],
    target: Sequence[str],
    columns: int = 3,
) -> Figure:
    """Plots an attention map for each title, all with the same tokens.

    Of longer sentences it plots the first `MOST_TOKENS` tokens, and says so.
    """
    cut = {"source": len(source), "target": len(target)}
    source, target = source[:MOST_TOKENS], target[:MOST_TOKENS]
    width, height = max(0.26 * len(source), 2.0), max(0.24 * len(target), 1.4)
    figure, grid = _grid(len(panels), columns, (width, height), sharey=True)
    for axes, (title, weights) in zip(grid, panels.items(), strict=False):
        shown = np.asarray(weights)[: len(target), : len(source)]
        axes.imshow(shown, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(source)), [*map(_plain, source)], rotation=60, ha="right")
        axes.set_yticks(range(len(target)), [*map(_plain, target)])
        axes.set_title(_plain(title))
        axes.label_outer()
    first = f"first {MOST_TOKENS} of"
    notes = [f"{first} {n} {side} tokens" for side, n in cut.items() if n > MOST_TOKENS]
    if notes:
        figure.suptitle(", ".join(notes), color=GRAY, fontsize=9)
    return figure


def attention_heads(
    layers: Mapping[str, Float[np.ndarray, "N T S"]], source: Sequence[str], target: Sequence[str]
) -> Figure:
    """Plots the attention map of every head: a row for each layer, a column for each head."""
    panels = {
        f"{name}, head {head}": weights
        for name, heads in layers.items()
        for head, weights in enumerate(heads)
    }
    return attention_maps(panels, source, target, columns=max(map(len, layers.values())))


@rc_context(_STYLE)
def lines(panels: Panels, x: str, xscale: str = "linear", yscale: str = "linear") -> Figure:
    """Plots a panel for each title and a line for each name. `x` labels the x-axis.

    On a logarithmic x-axis, the points' own x are the ticks where they are at most six.
    """
    figure, grid = _grid(len(panels), len(panels), (4.0, 3.0))
    for axes, (title, named) in zip(grid, panels.items(), strict=True):
        for name, points in named.items():
            xs, ys = zip(*points, strict=True) if points else ((), ())
            every = max(len(points) // 12, 1)
            axes.plot(xs, ys, label=_plain(name), markersize=4, markevery=every)
        for axis, set_scale, scale in (
            (axes.xaxis, axes.set_xscale, xscale),
            (axes.yaxis, axes.set_yscale, yscale),
        ):
            if scale == "log":
                set_scale(scale, base=2)
                axis.set_major_formatter("{x:,g}")
        measured = sorted({x for points in named.values() for x, _ in points})
        if xscale == "log" and len(measured) <= 6:
            axes.set_xticks(measured)
        axes.set(title=_plain(title), xlabel=x)
        if any(named):  # below the axis, where no line can cross it
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)
    return figure


def scaling(panels: Panels, x: str = "length") -> Figure:
    """Plots `lines` on logarithmic axes."""
    return lines(panels, x, xscale="log", yscale="log")


def training_curves(runs: Mapping[str, Iterable[Mapping[str, Any]]]) -> Figure:
    """Plots the loss and the development BLEU of runs by name against steps.

    A run is its records (`read_metrics`), or the evaluations of a result file, with step, loss and
    bleu. Losses are nats a token; that of training has label smoothing and auxiliary losses.
    """
    loss: dict[str, list[list[Number]]] = defaultdict(list)
    bleu: dict[str, list[list[Number]]] = defaultdict(list)
    for name, records in runs.items():
        label = f"{name} " if name else ""
        for record in records:
            kind, step = record.get("kind", "evaluation"), record.get("step", 0)
            if kind == "train":
                loss[f"{label}training"].append([step, record["loss"]])
            elif kind == "evaluation":
                scores = next(iter(record["sets"].values())) if "sets" in record else record
                loss[f"{label}development"].append([step, scores["loss"]])
                if scores.get("bleu") is not None:
                    bleu[name].append([step, scores["bleu"]])
    panels = {"loss": loss, "development BLEU": bleu}
    return lines({title: named for title, named in panels.items() if named}, "step")


@rc_context(_STYLE)
def positions(table: Float[np.ndarray, "L D"]) -> Figure:
    """Plots a table of positional encodings: a row for each position."""
    figure, (axes,) = _grid(1, 1, (5.0, 3.0))
    image = axes.imshow(table, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    axes.set(xlabel="dimension", ylabel="position")
    figure.colorbar(image)
    return figure


@rc_context(_STYLE)
def roofline(points: Mapping[str, tuple[float, float]], *, peak: float, bandwidth: float) -> Figure:
    """Plots what programs reach of what a machine can do (Williams et al. 2009).

    points: operations for each byte moved, and operations a second, by name. peak: operations a
    second; bandwidth: bytes a second.
    """
    figure, (axes,) = _grid(1, 1, (5.0, 3.6))
    ridge = peak / bandwidth
    intensities = [intensity for intensity, _ in points.values()] + [ridge]
    x = np.array([min(intensities) / 4, ridge, max(intensities) * 4])
    axes.loglog(x, np.minimum(peak, bandwidth * x) / 1e9, base=2, color=GRAY, marker="")
    for name, (intensity, rate) in points.items():
        axes.loglog(intensity, rate / 1e9, base=2, linestyle="none", label=_plain(name))
    axes.set(xlabel="FLOPs for each byte", ylabel="GFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.legend()
    return figure


@rc_context(_STYLE)
def beam_tree(beams: Sequence[Mapping[tuple[str, ...], float]]) -> Figure:
    """Plots the hypotheses of a beam search as a tree.

    beams: the hypotheses after each position with their scores, as tuples of tokens. A hypothesis
    that has no extension in the next beam was dropped, or has ended. The best of the last beam, and
    what it extends, is drawn in the first color.
    """
    most = max(map(len, beams))
    figure, (axes,) = _grid(1, 1, (0.95 * len(beams) + 1, 0.5 * most + 0.4))
    best = max(beams[-1], key=beams[-1].__getitem__)
    places: dict[tuple[str, ...], tuple[float, float]] = {(): (0.0, 0.0)}
    for position, beam in enumerate(beams, start=1):
        ordered = sorted(beam, key=beam.__getitem__, reverse=True)
        for row, tokens in enumerate(ordered):
            x, y = places[tokens] = (float(position), -float(row))
            color = COLORS[0] if best[:position] == tokens else GRAY
            if (parent := places.get(tokens[:-1])) is not None:
                start = parent[0] + (0.62 if parent[0] else 0)
                line = [start, x - 0.05], [parent[1], y]
                axes.plot(*line, color=color, linewidth=0.8, marker="")
            text = f"{tokens[-1]}\n{beam[tokens]:.2f}"
            axes.text(x, y, text, color=color, fontsize=7, va="center")
    axes.set(xlim=(-0.2, len(beams) + 1), ylim=(0.5 - most, 0.5))
    axes.set_axis_off()
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes a figure in the format of the suffix, such as .svg, .png or .pdf.

    The same figure always gives the same bytes. UserError: the format is unknown.
    """
    kind = path.suffix.removeprefix(".")
    if kind not in figure.canvas.get_supported_filetypes():
        raise UserError(f"{path}: unknown format; name a file that ends with .svg, .png or .pdf")
    with rc_context({**_STYLE, "svg.hashsalt": "transformer_jax", "svg.fonttype": "path"}):
        dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        options: Any = {"metadata": dates.get(kind), "bbox_inches": "tight"}
        with replacing(path) as temporary:
            figure.savefig(temporary, format=kind, dpi=150, **options)


def _plain(text: str) -> str:
    """Returns a text as Matplotlib shows it: not as a formula, and although it begins with "_"."""
    return f"{' ' * text.startswith('_')}{text}".replace("$", r"\$")


def _grid(
    count: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Figure, list[Axes]]:
    """Returns a figure of panels of this size in inches, and their axes."""
    columns = max(min(columns, count), 1)
    rows = max(-(-count // columns), 1)
    figure = Figure((size[0] * columns + 0.8, size[1] * rows + 0.8), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    axes = list(grid.flat)
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, axes[:count]
