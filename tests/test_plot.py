"""Figures hold what they are given, and are the same bytes for the same figure."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from transformer_jax import plot

EVALUATIONS = [{"step": s, "loss": 5 - s / 10, "bleu": float(s)} for s in (10, 20, 30)]


def points(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """The points of each line by its name."""
    lines = {str(line.get_label()): np.asarray(line.get_xydata()).tolist() for line in axes.lines}
    return {name: [*map(tuple, values)] for name, values in lines.items()}


def texts(axes: Axes) -> list[str]:
    """The texts in a panel."""
    return [text.get_text() for text in axes.texts]


def test_training_curves_of_results_and_of_runs() -> None:
    records = [
        {"kind": "message", "text": "a run has messages, too"},
        {"kind": "train", "step": 5, "loss": 6.0},
        {"kind": "evaluation", "step": 10, "sets": {"dev": {"loss": 4.0, "bleu": 10.0}}},
    ]
    loss, bleu = plot.training_curves({"a": records, "b": EVALUATIONS}).axes
    assert points(loss) == {
        "a training": [(5, 6)],
        "a development": [(10, 4)],
        "b development": [(10, 4), (20, 3), (30, 2)],
    }
    assert points(bleu) == {"a": [(10, 10)], "b": [(10, 10), (20, 20), (30, 30)]}


@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_the_same_figure_is_saved_alike(kind: str, tmp_path: Path) -> None:
    pictures = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.{kind}"
        plot.save(plot.training_curves({"": EVALUATIONS}), path)
        pictures.append(path.read_bytes())
    assert len(pictures[0]) > 1000
    assert pictures[0] == pictures[1]


def test_the_attention_map_has_targets_in_rows() -> None:
    weights = np.array([[0.9, 0.1, 0.0], [0.2, 0.3, 0.5]])
    (axes,) = plot.attention_map(weights, ["a", "b", "c"], ["x", "y"]).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b", "c"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["x", "y"]
    np.testing.assert_array_equal(np.asarray(axes.images[0].get_array()), weights)


def test_a_long_sentence_is_cut_and_the_picture_says_so() -> None:
    weights = np.random.default_rng(0).random((2, 70))
    figure = plot.attention_map(weights, [f"s{i}" for i in range(70)], ["x", "y"])
    assert figure.get_suptitle() == "first 64 of 70 source tokens"
    shown = np.asarray(figure.axes[0].images[0].get_array())
    np.testing.assert_array_equal(shown, weights[:, :64])


def test_each_head_is_a_panel_and_each_layer_a_row() -> None:
    layers = {name: np.full((2, 1, 2), i / 4) for i, name in enumerate("pqr")}
    panels = plot.attention_heads(layers, ["a", "b"], ["x"]).axes
    titles = [f"{name}, head {head}" for name in "pqr" for head in (0, 1)]
    assert [axes.get_title() for axes in panels] == titles
    for axes, wanted in zip(panels, (0, 0, 0.25, 0.25, 0.5, 0.5), strict=True):
        np.testing.assert_array_equal(np.asarray(axes.images[0].get_array()), [[wanted] * 2])


def test_ticks_of_a_logarithmic_axis_are_what_was_measured() -> None:
    few, many = ([(x, x) for x in xs] for xs in ((3_000, 29_000), range(1, 9)))
    panels = {"few": {"a": few}, "many": {"a": many}}
    one, other = plot.lines(panels, "pairs", xscale="log", yscale="log").axes
    assert [label.get_text() for label in one.get_xticklabels()] == ["3,000", "29,000"]
    assert {"4,096", "16,384"} <= {label.get_text() for label in one.get_yticklabels()}
    assert {"1", "2", "4", "8"} <= {label.get_text() for label in other.get_xticklabels()}
    (linear,) = plot.lines({"few": {"a": few}}, "pairs").axes
    assert len(linear.get_xticks()) > 2


def test_a_beam_tree_joins_hypotheses_to_what_they_extend() -> None:
    beams = [{("a",): -1.0, ("b",): -2.0}, {("b", "c"): -2.5, ("a", "c"): -3.0}]
    (axes,) = plot.beam_tree(beams).axes
    assert texts(axes) == ["a\n-1.00", "b\n-2.00", "c\n-2.50", "c\n-3.00"]
    assert len(axes.lines) == 4
    best = [text.get_text() for text in axes.texts if text.get_color() == plot.COLORS[0]]
    assert best == ["b\n-2.00", "c\n-2.50"]


def test_a_roofline_is_the_lesser_of_its_limits() -> None:
    (axes,) = plot.roofline({"a": (2.0, 3e9)}, peak=8e9, bandwidth=2e9).axes
    drawn = points(axes)
    assert drawn.pop("a") == [(2, 3)]
    (roof,) = drawn.values()
    np.testing.assert_allclose([y for _, y in roof], [min(8, 2 * x) for x, _ in roof])


def test_positions_and_scaling() -> None:
    table = np.linspace(-1, 1, 12).reshape(3, 4)
    axes = plot.positions(table).axes[0]
    np.testing.assert_array_equal(np.asarray(axes.images[0].get_array()), table)
    (axes,) = plot.scaling({"time": {"a": [(1, 2), (2, 4)]}}).axes
    assert points(axes) == {"a": [(1, 2), (2, 4)]}
    assert axes.get_xscale() == axes.get_yscale() == "log"


@pytest.mark.parametrize("name", ["$$", "a$x_$", "$\\foo$", "_hidden", "a%s", "a\nb"])
def test_names_and_tokens_are_shown_as_they_are(tmp_path: Path, name: str) -> None:
    figure = plot.lines({name: {name: [(1, 2), (2, 3)], "other": [(1, 2), (2, 3)]}}, x="x")
    plot.save(figure, tmp_path / "a.svg")
    legend = figure.axes[0].get_legend()
    assert legend is not None
    shown = [text.get_text().replace("\\$", "$").strip() for text in legend.get_texts()]
    assert shown == [name, "other"]
    plot.save(plot.attention_map(np.eye(2), [name, "b"], ["a", name]), tmp_path / "b.svg")
