"""What is written agrees with the code and the result files."""

import json
import re
from pathlib import Path

import pytest

from tools import documents

ROOT = Path(__file__).parents[2]
PAGES = [*documents.DOCUMENTS, ROOT / "CONTRIBUTING.md"]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_the_documents_are_up_to_date() -> None:
    """`make readme` brings them up to date."""
    texts, parts = [path.read_text("utf-8") for path in documents.DOCUMENTS], documents.parts()
    assert {*re.findall(r"<!-- (\w+) -->", "".join(texts))} - {"end"} == parts.keys()
    assert [documents.update(text, parts) for text in texts] == texts
    new = "a\n<!-- layers -->\nnew\n<!-- end -->\nb"
    assert documents.update(new.replace("new", "old\n"), {"layers": "new"}) == new


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_hold_no_outputs(path: Path) -> None:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


@pytest.mark.parametrize("document", PAGES, ids=lambda p: p.name)
def test_files_that_are_named_exist(document: Path) -> None:
    text = document.read_text("utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    files = re.findall(r"`((?:tests|tools|transformer_jax)/[\w./]*)`", text)
    paths = [*(document.parent / link for link in links), *(ROOT / file for file in files)]
    assert [path for path in paths if not path.exists()] == []
