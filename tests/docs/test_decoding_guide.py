"""docs/decoding.md is true: its Python runs, and its table names every field of the search."""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from transformer_jax.config import DecodeConfig
from transformer_jax.runs.run import Run

TEXT = (Path(__file__).parents[2] / "docs" / "decoding.md").read_text("utf-8")


@pytest.mark.long
def test_the_python_of_the_guide_runs(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(str(finished.folder), tmp_path / "runs" / "quickstart")
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.S):
        exec(compile(block, "decoding.md", "exec"), space)
    assert len(space["translation"].hypotheses) == 2


def test_the_guide_names_every_field_of_the_search() -> None:
    fields = {field.name for field in dataclasses.fields(DecodeConfig)} - {"batch_tokens"}
    named = {
        name
        for names in re.findall(r"^\| (`.*?) \|", TEXT, re.M)
        for name in re.findall(r"`(\w+)", names)
    }
    assert fields <= named
