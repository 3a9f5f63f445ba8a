"""What training reads before it begins."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from transformer_jax.config import Config
from transformer_jax.text import corpus, files
from transformer_jax.text.corpus import Corpora
from transformer_jax.training.setup import prepare


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
    prepare(config, None, corpora)
    source, target = data.dev[0].split(",")
    assert calls["read_lines", source] == calls["read_lines", target] == 1
    hashed = {path: count for (name, path), count in calls.items() if name == "text_digest"}
    assert len(hashed) == 4
    assert {*hashed.values()} == {1}
