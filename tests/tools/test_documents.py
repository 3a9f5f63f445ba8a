"""What is written agrees with the code and the result files."""

import json
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools import documents

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


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


@pytest.mark.parametrize("path", [*NOTEBOOKS, *documents.DOCUMENTS], ids=lambda p: p.stem)
def test_what_code_imports_exists(path: Path) -> None:
    text = path.read_text("utf-8")
    if path in NOTEBOOKS:
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    imports = re.findall(
        r"^from (transformer_jax[\w.]*) import (\([^)]*\)|.*)$", text, re.MULTILINE
    )
    for module, names in imports:
        for name in re.findall(r"\w+(?: as \w+)?", names):
            name = name.split()[0]
            assert hasattr(import_module(module), name) or find_spec(f"{module}.{name}"), name
