"""What is written agrees with the code and the result files."""

import json
import re
from pathlib import Path

import pytest

from tools import documents, tables
from transformer_jax.benchmark import results

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_documents_are_up_to_date() -> None:
    """`make readme` brings them up to date."""
    texts, parts = [path.read_text("utf-8") for path in documents.DOCUMENTS], documents.parts()
    assert {*re.findall(r"<!-- (\w+) -->", "".join(texts))} - {"end"} == parts.keys()
    assert [documents.update(text, parts) for text in texts] == texts
    new = "a\n<!-- layers -->\nnew\n<!-- end -->\nb"
    assert documents.update(new.replace("new", "old\n"), {"layers": "new"}) == new


def test_fields_of_templates_are_paths_with_divisors() -> None:
    row = {"a b": {"x-y": [{"n": 2048}, None]}, "shares": [0.5, 0.25], "none": 0.0}
    row["time"] = {"median": 1.5, "low": 1.0, "high": 2.0}
    cells = {
        "{a b/x-y/0/n:,.1f/1024} KiB": "2.0 KiB",
        "{time:.1f}": "1.5 (1.0 to 2.0)",
        "{shares:.0f/0.01}": "25 to 50",
        "{none:.0e}": "0",
        "{missing:.2f} / 1": "",
        "{a b/x-y/1/n:.2f}": "",
    }
    assert {cell: tables.show(cell, row) for cell in cells} == cells
    assert tables.table(["a", ""], ["x|y", ""]) == "| a |  |\n| --- | --- |\n| x\\|y |  |"


def test_every_module_says_what_it_is() -> None:
    modules = [path for top in ("transformer_jax", "tools") for path in Path(top).rglob("*.py")]
    assert [path for path in modules if not documents.first_line(path)] == []


def test_the_tree_names_what_there_is() -> None:
    listed = [line for line in documents.tree().splitlines() if not line.startswith("```")]
    assert all(len(line.split(maxsplit=1)) == 2 for line in listed)
    names = {line.split()[0] for line in listed}
    assert {f"{p.parent.name}/" for p in Path("transformer_jax").glob("*/__init__.py")} <= names


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.json")), ids=lambda p: p.stem)
def test_every_result_has_the_header(path: Path) -> None:
    stored = json.loads(path.read_text("utf-8"))
    assert tuple(stored)[: len(results.HEADER)] == results.HEADER
    assert re.fullmatch("[0-9a-f]{40}", stored["commit"])


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebooks_hold_no_outputs(path: Path) -> None:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


@pytest.mark.parametrize("document", documents.DOCUMENTS, ids=lambda p: p.name)
def test_files_that_are_named_exist(document: Path) -> None:
    text = document.read_text("utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    tests = re.findall(r"`(tests/[\w/]+\.py)`", text)
    paths = [*(document.parent / link for link in links), *(ROOT / test for test in tests)]
    assert [path for path in paths if not path.exists()] == []
