"""The runner of studies: runs side by side, continued and scored."""

import gzip
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tools.common import config_file
from tools.scores import Data, translations
from tools.study import Study, outputs_file, run_study
from transformer_jax.benchmark import results
from transformer_jax.config import Config, DecodeConfig


@pytest.fixture
def tiny(tiny_config: Config, here: Path) -> Study:
    """A study of two seeds, of four steps each. Results and runs are in a folder of its own."""
    folder = str(Path(tiny_config.data.train[0].split(",")[0]).parent)
    pattern = "{folder}/{part}.en,{folder}/{part}.de"
    data = Data(folder, pattern, dev="dev", test="dev", blind=("new",))
    (Path(folder) / "blind").mkdir()
    with gzip.open(f"{folder}/blind/new.en.gz", "wt") as file:
        file.write("the old man\na new book\n")
    path = config_file(tiny_config, here / "tiny.py")
    rows = {"a": {"train.seed": 0}, "b": {"train.seed": 1}}
    score = partial(translations, searches=[DecodeConfig(beam=1), DecodeConfig(beam=2)])
    return Study("tiny", data, rows, {"train.steps": 4}, score, str(path), keep_outputs=True)


@pytest.mark.slow
def test_runs_are_trained_continued_and_scored(tiny: Study) -> None:
    cores = os.sched_getaffinity(0)
    tiny = replace(
        tiny,
        before={"a": [["train", "--help"]]},
        summarize=lambda rows, _: {"steps": [row["steps"] for row in rows.values()]},
    )
    run_study("tiny", tiny, only=["b"])
    assert "steps" not in results.read("tiny")
    assert list(results.read("tiny")["rows"]) == ["b"]
    run_study("tiny", tiny)
    assert results.read("tiny")["steps"] == [4, 4]
    before = Path("runs/tiny/b.log").read_bytes()
    run_study("tiny", replace(tiny, rows={**tiny.rows, "a": {"train.steps": 6}}))
    log = Path("runs/tiny/a.log").read_text("utf-8")
    assert "continuing run" in log
    assert log.count("usage:") == 1  # the command before the training
    assert Path("runs/tiny/b.log").read_bytes() == before
    assert os.sched_getaffinity(0) == cores
    stored = results.read("tiny")
    assert (stored["command"], stored["steps"]) == ("make study NAME=tiny", [6, 4])
    assert [(label, row["seed"]) for label, row in stored["rows"].items()] == [("a", 0), ("b", 1)]
    row = stored["rows"]["a"]
    assert row["card"]["config"]["train"]["steps"] == 6
    assert row["machine"]["cores"] == len(cores)
    assert outputs_file("tiny", "a", "dev").read_text("utf-8").count("\n") == 20
    assert outputs_file("tiny", "a", "new").read_text("utf-8").count("\n") == 2
