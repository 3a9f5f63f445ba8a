"""What is written agrees with the code and the result files."""

import json
import re
from pathlib import Path

import pytest

from transformer_jax.benchmark import readme, results

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_documents_are_up_to_date() -> None:
    """`make readme` brings them up to date."""
    texts = [document.read_text("utf-8") for document in readme.DOCUMENTS]
    assert {*re.findall(r"<!-- (\w+) -->", "".join(texts))} - {"end"} == set(readme.PARTS)
    assert [readme.update(text) for text in texts] == texts


def test_every_file_says_what_it_is() -> None:
    listed = readme.tree().splitlines()
    assert all(len(line.split(maxsplit=1)) == 2 for line in listed if not line.startswith("```"))


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.json")), ids=lambda p: p.stem)
def test_every_result_has_the_header(path: Path) -> None:
    found = json.loads(path.read_text("utf-8"))
    assert tuple(found)[: len(results.HEADER)] == results.HEADER
    assert re.fullmatch("[0-9a-f]{40}", found["commit"])


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebooks_hold_no_outputs(path: Path) -> None:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


@pytest.mark.parametrize("document", readme.DOCUMENTS, ids=str)
def test_relative_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text("utf-8")):
        assert (document.parent / target).exists(), target
