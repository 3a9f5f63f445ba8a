"""What training reads before it begins."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import build, make_batch, tiny

from transformer_jax.config import Config
from transformer_jax.text import corpus, files
from transformer_jax.text.corpus import Corpora
from transformer_jax.training.losses import symmetric_divergence
from transformer_jax.training.setup import set_up
from transformer_jax.training.step import loss_fn


def test_a_corpus_is_hashed_once_and_dev_text_is_read_once(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[tuple[str, str]] = Counter()

    def counted(module: Any, name: str) -> Any:
        function = getattr(module, name)
        return lambda path: calls.update([(name, path)]) or function(path)

    for module, name in ((corpus, "text_digest"), (files, "read_lines")):
        monkeypatch.setattr(module, name, counted(module, name))
    data = dataclasses.replace(tiny_config.data, cache=str(tmp_path))
    config = dataclasses.replace(tiny_config, data=data)
    corpora = Corpora.of(data)
    corpora.digests()
    set_up(config, corpora=corpora)
    source, target = data.dev[0].split(",")
    assert calls["read_lines", source] == calls["read_lines", target] == 1
    hashed = {path: count for (name, path), count in calls.items() if name == "text_digest"}
    assert len(hashed) == 4
    assert {*hashed.values()} == {1}


def test_r_drop_computes_each_pair_twice() -> None:
    """The two rows of a pair differ in dropout alone, its tokens count once, and evaluation is as
    without it."""
    model, params = build(tiny(dropout=0.1))
    batch, key = make_batch([(7, 6), (3, 2), (1, 1), (0, 0)]), jax.random.key(0)
    batch = jax.tree.map(jnp.asarray, batch)
    twice = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), batch)
    plain, r_drop = (jax.jit(loss_fn(model, 0.1, weight)) for weight in (0.0, 3.0))
    total, (tokens, _) = r_drop(params, batch, key, {})
    smoothed, (wanted, _) = plain(params, twice, key, {})
    output: Any = jax.jit(model.apply)({"params": params}, twice, key)
    divergence = symmetric_divergence(output.logits, twice.target_out)
    assert divergence > 0.01
    np.testing.assert_allclose(total, (smoothed + 1.5 * divergence) / 2, rtol=1e-5)
    assert 2 * tokens == wanted == 18
    for ours, alone in zip(*(f(params, batch, None, {}) for f in (r_drop, plain)), strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, alone)
