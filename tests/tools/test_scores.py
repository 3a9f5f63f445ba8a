"""The scores of a run are those of the checkpoints that translate."""

import shutil
from pathlib import Path

import jax
import numpy as np

from tools import scores
from transformer_jax.config import DecodeConfig
from transformer_jax.decoding.translator import Translator
from transformer_jax.runs import checkpoint, run
from transformer_jax.runs.run import Run


def test_the_mean_of_the_newest_checkpoints_translates(finished: Run, tmp_path: Path) -> None:
    trained = run.load(shutil.copytree(finished.folder, tmp_path / "r"))
    mean = scores.averaged(trained)
    wanted = checkpoint.average(trained.checkpoints, trained.newest_steps())
    jax.tree.map(np.testing.assert_array_equal, mean.params(), wanted)
    assert scores.averaged(trained).folder == mean.folder == tmp_path / "r_averaged"

    dev = finished.config.data.dev[0]
    data = scores.Data("", "{part}", dev=dev, test=dev)
    search = DecodeConfig(beam=1)
    values, outputs = scores.translations(trained, data, [search], average=True)
    translator = Translator.load(mean.folder, decode=search)
    assert outputs == scores.texts(translator, data.sides(dev)[0])
    assert outputs != scores.texts(
        Translator.load(trained.folder, decode=search), data.sides(dev)[0]
    )
    assert values["steps"] == 12  # those of the training
