"""The measurements of documents run on something tiny, and compute what they say."""

import json
from pathlib import Path
from typing import Any

import pytest
from common import VOCABULARY, tiny

from tools import measure
from transformer_jax.benchmark import results
from transformer_jax.runs.run import Run

REDUCED: dict[str, dict[str, Any]] = {
    "remat": {"model": tiny(), "vocabulary": VOCABULARY, "rows": 2, "length": 4},
    "windows": {"lengths": (128,), "widths": (8,), "samples": 1},
    "real_sizes": {},
}


def names(value: Any) -> set[str]:
    """The paths of a tree's leaves, without the numbers of list elements."""
    if isinstance(value, dict):
        return {f"/{key}{path}" for key in value for path in names(value[key])}
    return set().union(*map(names, value)) if isinstance(value, list) else {""}


def committed(name: str) -> set[str]:
    """The same of results/NAME.json, without the header."""
    tree = results.read(name)
    return names({key: tree[key] for key in tree.keys() - {*results.HEADER}})


@pytest.mark.long
@pytest.mark.parametrize("name", REDUCED)
def test_a_case_measures_what_its_result_file_holds(name: str) -> None:
    assert committed(name) <= names(measure.CASES[name](**REDUCED[name]))


@pytest.mark.long
def test_memory_does_not_grow_with_the_lines(finished: Run) -> None:
    measured = measure.million_lines(finished.folder, 30_000, (10_000, 30_000))
    assert measured["translated"] == 30_000
    first, last = measured["peak_mib"].values()
    assert 100 < last < 1.2 * first


def test_a_result_is_written_also_where_git_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    path = results.write("x", "make x", {"value": 3}, tmp_path)
    written = json.loads(path.read_text("utf-8"))
    assert tuple(written) == (*results.HEADER, "value")
    assert written["commit"] == ""
