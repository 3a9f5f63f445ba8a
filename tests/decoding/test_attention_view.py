"""The page of attention weights: what it holds, and that a sentence in it is only text."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import Capture, Patch, error_line, sentence_weights

from transformer_jax import Translator, plot
from transformer_jax.cli.main import main
from transformer_jax.decoding.attention_view import MAX_TOKENS, attention_view
from transformer_jax.decoding.attention_weights import (
    SentenceWeights,
    View,
    attention_weights,
    choose_view,
)
from transformer_jax.errors import UserError
from transformer_jax.runs.run import Run


def weights_of(tokens: list[str], layers: int = 1, heads: int = 2) -> SentenceWeights:
    """Random weights of a sentence that is its own translation."""
    return sentence_weights(tokens, tokens, layers, heads)


def data(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(text)


def test_it_holds_the_weights() -> None:
    weights = weights_of(["▁a", "▁b", "</s>"])
    page = data(attention_view(weights))
    assert (page["source"], page["inputs"]) == (["▁a", "▁b", "</s>"], ["<s>", "▁a", "▁b"])
    assert page["note"] == ""
    stored = page["layers"]["cross"]["0"]
    values = np.frombuffer(base64.b64decode(stored["weights"]), "<u2").reshape(stored["shape"])
    np.testing.assert_allclose(values / 65535, weights.layers["cross"][0], atol=1 / 65535)


def test_a_sentence_is_only_text() -> None:
    """And the page asks for nothing."""
    token = "</script><script>alert(1)</script><img src=x>"
    page = attention_view(weights_of([token, "</s>"]))
    assert data(page)["source"][0] == token
    assert page.count("<script") == page.count("</script>") == 2
    assert not re.search(r"src=(?!x)|href|url\(|https?:", page)


@pytest.mark.parametrize(("layers", "heads", "shown"), [(1, 2, MAX_TOKENS), (6, 16, 32)])
def test_long_sentences_are_cut_to_a_small_page(layers: int, heads: int, shown: int) -> None:
    page = attention_view(weights_of([f"▁{i}" for i in range(60)], layers, heads))
    stored = data(page)
    assert len(stored["source"]) == stored["layers"]["cross"]["0"]["shape"][1] == shown
    assert stored["note"] == f"Only the first {shown} of 60 tokens are shown."
    assert len(page.encode()) < 1_000_000


def test_the_command_writes_it(finished: Run, tmp_path: Path, capsys: Capture) -> None:
    command = ["attention", f"--run={finished.folder}", "-o", str(tmp_path / "view.html")]
    main([*command, "red green", "--target=grün rot"])
    page = data((tmp_path / "view.html").read_text("utf-8"))
    assert page["outputs"][-1] == "</s>"
    assert [*page["layers"]] == ["encoder", "decoder", "cross"]
    assert page["first"] == {"attention": "cross", "layer": 0, "head": None}
    chosen = ("red", "--attention=encoder", "--layer=0.1")
    main([*command[:2], "-o", str(tmp_path / "view.html"), *chosen])
    page = data((tmp_path / "view.html").read_text("utf-8"))
    assert page["first"] == {"attention": "encoder", "layer": 0, "head": 1}
    assert "is blank" in error_line([*command[:2], "-o", str(tmp_path / "x.html"), " "], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["view.html"]


def test_the_command_draws_heads(finished: Run, tmp_path: Path, monkeypatch: Patch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plot, "save", lambda figure, path: drawn.append((figure, path)))
    command = ["attention", f"--run={finished.folder}", "red green", "--target=grün"]
    main([*command, "-o", str(tmp_path / "x.svg"), "--attention=decoder", "--layer=0"])
    main([*command, "-o", str(tmp_path / "y.pdf"), "--attention=decoder", "--layer=0.1"])
    (both, _), (one, path) = drawn
    weights = attention_weights(Translator.load(finished.folder), "red green", "grün")
    titles = [axes.get_title() for axes in both.axes if axes.images]
    assert titles == [f"decoder layer 0, head {i}" for i in (0, 1)]
    assert path == tmp_path / "y.pdf"
    axes = one.axes[0]
    wanted = weights.layers["decoder"][0][1]
    np.testing.assert_allclose(np.asarray(axes.images[0].get_array()), wanted, atol=1e-6)
    assert [x.get_text() for x in axes.get_yticklabels()] == weights.outputs
    assert [x.get_text() for x in axes.get_xticklabels()] == weights.inputs


def test_the_default_view_is_the_last_layer_of_cross_attention() -> None:
    weights = weights_of(["▁a", "</s>"], layers=3)
    assert choose_view(weights) == View("cross", 2, None)
    alone = weights._replace(layers={"encoder": weights.layers["encoder"]})
    assert choose_view(alone) == View("encoder", 2, None)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (("self",), "attention self: does not exist or has no weights; must be one of encoder, "),
        (("encoder", 2), "encoder attention: layer 2: .* must be one of 0, 1"),
        ((None, 1, 2), "cross attention, layer 1: head 2: .* must be one of 0, 1"),
    ],
)
def test_what_does_not_exist_is_named(chosen: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_view(weights_of(["▁a", "</s>"], layers=2), *chosen)
