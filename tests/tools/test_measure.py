"""The measurements of documents run on something tiny, and compute what they say."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from common import VOCABULARY, build, make_batch, tiny

from tools import measure
from transformer_jax.benchmark import results
from transformer_jax.data.buckets import Shape
from transformer_jax.models.transformer import Transformer
from transformer_jax.runs.run import Run
from transformer_jax.training.step import loss_fn

SMALL = (tiny(), VOCABULARY, Shape(8, 4, 4))
REDUCED: dict[str, dict[str, Any]] = {
    "layers": {"models": {"tiny": SMALL, "small": SMALL}, "samples": 1},
    "remat": {"model": tiny(), "vocabulary": VOCABULARY, "rows": 2, "length": 4},
    "windows": {"lengths": (128,), "widths": (8,), "samples": 1},
    "real_sizes": {},
}


def names(value: Any) -> set[str]:
    """The paths of a tree's leaves, without the numbers of list elements."""
    if isinstance(value, dict):
        return {f"/{key}{path}" for key in value for path in names(value[key])}
    return set().union(*map(names, value)) if isinstance(value, list) else {""}


@pytest.mark.parametrize("name", REDUCED)
def test_a_case_measures_what_its_result_file_holds(name: str) -> None:
    committed = results.read(name)
    wanted = names({key: committed[key] for key in committed.keys() - {*results.HEADER}})
    assert wanted <= names(measure.CASES[name](**REDUCED[name]))


def test_stacked_layers_are_the_same_model() -> None:
    config = tiny(layers=2)
    model, params = build(config)
    assert isinstance(model, Transformer)
    batch, key = make_batch([(5, 4), (7, 6)]), jax.random.key(0)
    separate, sums = jax.jit(loss_fn(model, 0.1))(params, batch, key, {})
    stacked, found = jax.jit(measure.stacked_loss(model))(measure.stack(params), batch, key, {})
    np.testing.assert_allclose(separate, stacked, rtol=1e-5)
    assert sums.tokens == found.tokens


@pytest.mark.long
def test_memory_does_not_grow_with_the_lines(finished: Run) -> None:
    found = measure.million_lines(finished.folder, 60_000, (20_000, 60_000))
    assert found["translated"] == 60_000
    first, last = found["peak_mib"].values()
    assert 100 < last < 1.2 * first


def test_a_result_is_written_also_where_git_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("GLIBC_TUNABLES", "")
    monkeypatch.setitem(measure.CASES, "windows", lambda: {"value": 3})
    monkeypatch.setattr(sys, "argv", ["measure", "windows"])
    monkeypatch.chdir(tmp_path)
    measure.main()
    found = json.loads(Path("results/windows.json").read_text("utf-8"))
    assert tuple(found) == (*results.HEADER, "value")
    assert found["command"] == "make measure NAME=windows"
    assert found["commit"] == ""
    assert found["machine"]["cores"] >= 1
