"""The benchmarks measure what they say."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from common import VOCABULARY, build, make_batch, tiny

from tools.layers import stack, stacked_loss
from transformer_jax.benchmark import results
from transformer_jax.training.step import loss_fn


def test_stacked_layers_are_the_same_model() -> None:
    config = tiny(layers=2)
    model, params = build(config)
    batch, key = make_batch([(5, 4), (7, 6)]), jax.random.key(0)
    separate, (tokens, _) = jax.jit(loss_fn(model, 0.1))(params, batch, key, {})
    stacked, found = jax.jit(stacked_loss(config, VOCABULARY))(stack(params), batch, key, {})
    np.testing.assert_allclose(separate, stacked, rtol=1e-5)
    assert tokens == found.tokens


def test_results_begin_with_the_header(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = results.write("x", "make x", {"value": 3})
    found = results.read("x")
    assert path.name == "x.json"
    assert tuple(found) == (*results.HEADER, "value")
    assert found["machine"]["cores"] >= 1


def test_results_are_written_where_git_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    path = results.write("x", "make x", {"value": 3}, tmp_path)
    assert json.loads(path.read_text("utf-8"))["commit"] == ""
