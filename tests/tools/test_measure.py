"""The memory that translation needs, and the files that results are written to."""

import json
from pathlib import Path

import pytest

from tools import measure
from transformer_jax.benchmark import results
from transformer_jax.runs.run import Run


@pytest.mark.slow
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
