"""Notebooks are executed from a clean kernel, in their folder, and stay as they are."""

from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from tools import notebooks

pytestmark = pytest.mark.long


def written(path: Path, *cells: str) -> Path:
    nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in cells]), path)
    return path


def test_outputs_are_in_the_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "a.ipynb", "import os", "print(os.getcwd())")
    before = path.read_bytes()
    assert 0 < notebooks.execute(path, tmp_path / "out") < 60
    assert capsys.readouterr().out.startswith("a.ipynb: ")
    assert path.read_bytes() == before
    (output,) = nbformat.read(tmp_path / "out" / "a.ipynb", 4).cells[1].outputs
    assert output.text == f"{tmp_path}\n"


def test_an_error_is_not_passed_over_and_a_slow_notebook_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a.ipynb", "1 / 0")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        notebooks.execute(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(notebooks, "LIMIT", 0)
    with pytest.raises(SystemExit, match=r"more than 0 s of CPU time: .*a\.ipynb"):
        notebooks.main([str(written(path, "1"))])
