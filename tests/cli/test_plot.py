"""Pictures of runs and of result files from the command line."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from common import Capture, Patch, error_line

from transformer_jax import plot
from transformer_jax.cli.main import main
from transformer_jax.runs.run import Run


@pytest.fixture
def drawn(monkeypatch: Patch) -> list[Any]:
    """What `plot.training_curves` and `plot.lines` are called with."""
    calls: list[Any] = []
    for name in ("training_curves", "lines"):
        function = getattr(plot, name)

        def called(panels: Any, *x: str, function: Any = function, **options: Any) -> Any:
            calls.append(panels)
            return function(panels, *x, **options)

        monkeypatch.setattr(plot, name, called)
    return calls


def test_runs_and_results_in_one_picture(finished: Run, tmp_path: Path, drawn: list[Any]) -> None:
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"evaluations": [{"step": 1, "loss": 2.0, "bleu": 3.0}]}), "utf-8")
    main(["plot", str(finished.folder), str(result), "-o", str(tmp_path / "x.png")])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    curves = drawn[0]
    assert list(curves) == ["finished", "result"]
    assert {record["kind"] for record in curves["finished"]} >= {"train", "evaluation"}


@pytest.mark.parametrize("name", ["multi30k_en_de", "attention", "scaling"])
def test_results_of_the_project(name: str, tmp_path: Path, drawn: list[Any]) -> None:
    main(["plot", f"results/{name}.json", "-o", str(tmp_path / "x.svg")])
    assert (tmp_path / "x.svg").read_text("utf-8").startswith("<?xml")
    assert drawn[0]


def test_bad_input(finished: Run, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    (tmp_path / "list.json").write_text("[1]", "utf-8")
    (tmp_path / "other.json").write_text('{"a": 1}', "utf-8")
    (tmp_path / "damaged.json").write_text('{"evaluations": [1]}', "utf-8")
    (tmp_path / "points.json").write_text('{"curves": {"panels": {"": {"": [1]}}}}', "utf-8")
    (tmp_path / "run").mkdir()
    output, run = tmp_path / "x.svg", str(finished.folder)
    for sources, message in (
        ([f"{tmp_path}/list.json"], "list.json: has nothing to plot: none of"),
        ([f"{tmp_path}/other.json"], "other.json: has nothing to plot: none of"),
        ([f"{tmp_path}/damaged.json"], "damaged.json: is damaged: TypeError"),
        ([f"{tmp_path}/points.json"], "points.json: is damaged: TypeError"),
        ([f"{tmp_path}/run"], "run: has no metrics to plot yet; train it first"),
        ([run, "results/scaling.json"], "results/scaling.json: is no training; plot it alone"),
    ):
        assert message in error_line(["plot", *sources, "-o", str(output)], capsys)
    assert not output.exists()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = error_line(["plot", run, "-o", str(output)], capsys)
    assert "plot: needs matplotlib; pip install 'transformer-jax[plot]'" in line
