"""The page of attention weights: what it holds, and that a sentence in it is only text."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
from common import error_line

from transformer_jax.attention_view import MAX_TOKENS, attention_view
from transformer_jax.cli.main import main
from transformer_jax.decoding.attention_weights import SentenceWeights
from transformer_jax.runs.run import Run


def made(tokens: list[str], layers: int = 1, heads: int = 2) -> SentenceWeights:
    draw = np.random.default_rng(0)
    shape = heads, len(tokens), len(tokens)
    weights = {i: draw.dirichlet(np.ones(len(tokens)), shape[:2]) for i in range(layers)}
    names = ("encoder", "decoder", "cross")
    return SentenceWeights(tokens, ["<s>", *tokens[:-1]], tokens, dict.fromkeys(names, weights))


def data(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(text)


def test_it_holds_the_weights() -> None:
    weights = made(["▁a", "▁b", "</s>"])
    found = data(attention_view(weights))
    assert (found["source"], found["inputs"]) == (["▁a", "▁b", "</s>"], ["<s>", "▁a", "▁b"])
    assert found["note"] == ""
    stored = found["layers"]["cross"]["0"]
    values = np.frombuffer(base64.b64decode(stored["weights"]), "<u2").reshape(stored["shape"])
    np.testing.assert_allclose(values / 65535, weights.layers["cross"][0], atol=1 / 65535)


def test_a_sentence_is_only_text() -> None:
    """And the page asks for nothing."""
    token = "</script><script>alert(1)</script><img src=x>"
    page = attention_view(made([token, "</s>"]))
    assert data(page)["source"][0] == token
    assert page.count("<script") == page.count("</script>") == 2
    assert not re.search(r"src=(?!x)|href|url\(|https?:", page)


@pytest.mark.parametrize(("layers", "heads", "shown"), [(1, 2, MAX_TOKENS), (6, 16, 32)])
def test_long_sentences_are_cut_to_a_page_below_a_megabyte(
    layers: int, heads: int, shown: int
) -> None:
    page = attention_view(made([f"▁{i}" for i in range(60)], layers, heads))
    found = data(page)
    assert len(found["source"]) == found["layers"]["cross"]["0"]["shape"][1] == shown
    assert found["note"] == f"Only the first {shown} of 60 tokens are shown."
    assert len(page.encode()) < 1_000_000


def test_the_command_writes_it(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["attention", f"--run={finished.folder}", "-o", str(tmp_path / "view.html")]
    main([*command, "red green", "--target=grün rot"])
    found = data((tmp_path / "view.html").read_text("utf-8"))
    assert found["outputs"][-1] == "</s>"
    assert [*found["layers"]] == ["encoder", "decoder", "cross"]
    assert "is blank" in error_line([*command[:2], "-o", str(tmp_path / "x.html"), " "], capsys)
    missing = str(tmp_path / "no" / "x.html")
    assert "no/x.html" in error_line([*command[:2], "-o", missing, "red"], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["view.html"]
