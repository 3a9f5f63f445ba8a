"""The runner of studies: runs side by side, continued, and rows that are kept."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tools.common import config_file
from tools.scores import Data, translations
from tools.study import Study, kept, outputs_file, run_study
from transformer_jax.benchmark import results
from transformer_jax.config import Config, DecodeConfig
from transformer_jax.runs import card, run
from transformer_jax.runs.run import Run


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Result files and runs go to `tmp_path`."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tiny(tiny_config: Config, tmp_path: Path) -> Study:
    """A study of two seeds, of four steps each."""
    folder = str(Path(tiny_config.data.train[0].split(",")[0]).parent)
    data = Data(folder, "{folder}/{part}.en,{folder}/{part}.de", dev="dev", test="dev")
    path = config_file(tiny_config, tmp_path / "tiny.py")
    rows = {"a": {"train.seed": 0}, "b": {"train.seed": 1}}
    score = partial(translations, searches=[DecodeConfig(beam=1), DecodeConfig(beam=2)])
    return Study("tiny", data, rows, {"train.steps": 4}, score, str(path), keep_outputs=True)


@pytest.mark.long
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
    assert outputs_file("tiny", "a").read_text("utf-8").count("\n") == 20


@pytest.fixture
def stored(finished: Run) -> dict[str, Any]:
    """The card of `finished`, which is that of row a of a result. Row b has none."""
    stored = card.make(run.load(finished.folder))
    results.write("tiny", "make x", {"rows": {"a": {"card": stored}, "b": {"bleu": 1.0}}})
    return stored


@pytest.mark.parametrize(
    "edit",
    [
        lambda stored: stored["provenance"]["versions"].update(jax="0.0.0"),
        lambda stored: stored["provenance"]["data_digests"].update(dev={}),
        lambda stored: stored["config"]["train"].update(seed=7),
    ],
    ids=["versions", "data", "config"],
)
def test_rows_of_other_configs_data_and_versions_are_made_anew(
    stored: dict[str, Any], finished: Run, edit: Callable[[dict[str, Any]], None]
) -> None:
    configs = {"a": finished.config, "b": finished.config}
    assert list(kept("tiny", configs)) == ["a"]
    assert kept("missing", configs) == {}
    edit(stored)
    results.write("tiny", "make x", {"rows": {"a": {"card": stored}}})
    assert kept("tiny", configs) == kept("tiny", configs, only=["a"]) == {}
    assert list(kept("tiny", configs, only=["b"])) == ["a"]  # which is not to be trained now
