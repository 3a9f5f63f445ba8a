"""The reference with published settings."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from tools import measured
from tools.multi30k import published_recipe
from tools.published import averaged
from transformer_jax.config import DecodeConfig
from transformer_jax.files import AnyPath
from transformer_jax.models.make import count_parameters
from transformer_jax.runs import checkpoint, run
from transformer_jax.runs.run import Run
from transformer_jax.text.corpus import Corpus


def test_it_has_the_published_settings() -> None:
    """2.6 million parameters, with 10,000 ids that source and target share."""
    config = published_recipe(Path("data"))
    assert 2.55e6 < count_parameters(config.model, 10_000, 10_000) < 2.65e6
    model, optimizer, train = config.model, config.optimizer, config.train
    assert (model.layers, model.decoder_layers, model.heads, model.kv_heads) == (4, None, 4, None)
    assert (model.norm, model.positions, model.tied) == ("post", "sinusoidal", "all")
    assert (model.dropout, optimizer.label_smoothing) == (0.3, 0.1)
    assert (optimizer.kind, optimizer.schedule) == ("adam", "inverse_sqrt")
    assert (optimizer.learning_rate, optimizer.warmup, optimizer.ema) == (0.005, 2_000, None)
    assert (config.data.batch_tokens, train.steps, train.keep) == (8_192, 8_000, 10)
    assert config.decode.beam == 5


def test_the_mean_of_the_newest_checkpoints_translates(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = run.load(shutil.copytree(finished.folder, tmp_path / "r"))
    mean = averaged(trained)
    wanted = checkpoint.average(trained.checkpoints, trained.newest_steps())
    jax.tree.map(np.testing.assert_array_equal, mean.params(), wanted)
    assert averaged(trained).folder == mean.folder == tmp_path / "r_averaged"

    folders = list[AnyPath]()

    def load(folder: AnyPath, decode: DecodeConfig) -> Callable[[Sequence[str]], list[Any]]:
        folders.append(folder)
        return lambda texts: [SimpleNamespace(text=text) for text in texts]

    monkeypatch.setattr(measured.Translator, "load", load)
    dev = Corpus(finished.config.data.dev[0])
    values, _ = measured.measure(trained, dev, dev, "de", mean)
    assert {*folders} == {mean.folder}
    assert values["steps"] == 12  # those of the training
