"""Figures hold what they are given, and are the same bytes for the same figure."""

from pathlib import Path

import numpy as np
from matplotlib import pyplot

from transformer_jax import plot

EVALUATIONS = [{"step": s, "loss": 5 - s / 10, "bleu": float(s)} for s in (10, 20, 30)]


def test_the_training_curve_has_loss_and_bleu_and_is_saved_alike(tmp_path: Path) -> None:
    pictures = []
    for name in ("a.svg", "b.svg"):
        axes = plot.training_curve(EVALUATIONS)
        left, right = axes.figure.axes
        np.testing.assert_array_equal(left.lines[0].get_xydata(), [(10, 4), (20, 3), (30, 2)])
        np.testing.assert_array_equal(right.lines[0].get_xydata(), [(10, 10), (20, 20), (30, 30)])
        plot.save(axes, tmp_path / name)
        pictures.append((tmp_path / name).read_bytes())
    assert pictures[0].startswith(b"<?xml")
    assert pictures[0] == pictures[1]


def test_the_attention_map_has_targets_in_rows(tmp_path: Path) -> None:
    weights = np.array([[0.9, 0.1, 0.0], [0.2, 0.3, 0.5]])
    axes = plot.attention_map(weights, ["a", "b", "c"], ["x", "y"])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b", "c"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["x", "y"]
    np.testing.assert_array_equal(axes.images[0].get_array(), weights)
    plot.save(axes, tmp_path / "map.svg")
    assert pyplot.get_fignums() == []


def test_attention_maps_are_a_panel_each() -> None:
    panels = {name: np.full((1, 2), i / 4) for i, name in enumerate("pqr")}
    first = plot.attention_maps(panels, ["a", "b"], ["x"], columns=2)
    shown = [axes for axes in first.figure.axes if axes.axison]
    assert [axes.get_title() for axes in shown] == ["p", "q", "r"]
    for axes, weights in zip(shown, panels.values(), strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), weights)
    pyplot.close()
