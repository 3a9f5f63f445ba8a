"""The runs of a study, trained side by side."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools import campaign
from tools.measured import measure
from transformer_jax.benchmark import results
from transformer_jax.config import Config
from transformer_jax.runs import card, run
from transformer_jax.runs.run import Run
from transformer_jax.text.corpus import Corpus


@pytest.fixture
def configs(tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two configs of four steps; result files go to `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    train = replace(tiny_config.train, steps=4)
    return {
        name: replace(tiny_config, train=replace(train, seed=seed))
        for name, seed in (("a", 0), ("b", 1))
    }


def no_summary(_: campaign.Rows) -> dict[str, Any]:
    """The summary of a study that has none."""
    return {}


@pytest.mark.long
def test_runs_are_trained_continued_and_measured(
    tiny_config: Config, configs: dict[str, Config], tmp_path: Path
) -> None:
    cores, dev = os.sched_getaffinity(0), Corpus(tiny_config.data.dev[0])

    def row(_: str, trained: Run) -> dict[str, Any]:
        return measure(trained, dev, dev, "de")[0]

    campaign.study("tiny", configs, row, lambda _: {"n": 0}, tmp_path, only=["b"])
    assert "n" not in results.read("tiny")
    assert list(results.read("tiny")["rows"]) == ["b"]
    campaign.study("tiny", configs, row, no_summary, tmp_path)
    configs["a"] = replace(configs["a"], train=replace(configs["a"].train, steps=6))
    before = (tmp_path / "b.log").read_bytes()
    rows = campaign.study("tiny", configs, row, lambda rows: {"n": len(rows)}, tmp_path)
    assert "continuing run" in (tmp_path / "a.log").read_text("utf-8")
    assert (tmp_path / "b.log").read_bytes() == before
    assert os.sched_getaffinity(0) == cores
    assert results.read("tiny")["n"] == 2
    assert list(results.read("tiny")["rows"]) == ["a", "b"]
    assert [rows[name]["seed"] for name in configs] == [0, 1]
    assert rows["a"]["steps"] == 6
    assert rows["a"]["target_tokens"] > 100
    assert rows["a"]["card"]["config"]["train"]["steps"] == 6
    assert rows["a"]["machine"]["cores"] == len(cores)


def test_rows_of_other_configs_data_and_versions_are_made_anew(
    configs: dict[str, Config], finished: Run, tmp_path: Path
) -> None:
    configs = {"a": finished.config}
    stored = card.make(run.load(finished.folder))
    results.write("tiny", "make tiny", {"rows": {"a": {"card": stored}, "old": {"card": stored}}})
    assert list(campaign.kept("tiny", configs)) == ["a"]
    assert campaign.kept("missing", configs) == {}
    changed = replace(finished.config, train=replace(finished.config.train, seed=7))
    assert campaign.kept("tiny", {"a": changed}) == {}
    versions = stored["provenance"]["versions"] | {"jax": "0.0.0"}
    digests = {**stored["provenance"]["data_digests"], "dev": {}}
    for part in ({"versions": versions}, {"data_digests": digests}):
        other = stored | {"provenance": stored["provenance"] | part}
        results.write("tiny", "make tiny", {"rows": {"a": {"card": other}}})
        assert campaign.kept("tiny", configs) == {}


def test_rows_that_are_not_to_be_trained_now_are_kept(
    configs: dict[str, Config], finished: Run
) -> None:
    stored = card.make(run.load(finished.folder))
    results.write("tiny", "make tiny", {"rows": {label: {"card": stored} for label in configs}})
    assert campaign.kept("tiny", configs) == {}  # that of a run of other settings
    assert list(campaign.kept("tiny", configs, only=["b"])) == ["a"]


def test_the_data_of_a_row_may_be_elsewhere(
    configs: dict[str, Config], finished: Run, tmp_path: Path
) -> None:
    stored = card.make(run.load(finished.folder))
    results.write("tiny", "make tiny", {"rows": {"a": {"card": stored}}})
    moved = []
    for old in finished.config.data.train[0].split(","):
        (tmp_path / Path(old).name).write_bytes(Path(old).read_bytes())
        moved.append(str(tmp_path / Path(old).name))
    data = replace(finished.config.data, train=(",".join(moved),))
    elsewhere = {"a": replace(finished.config, data=data)}
    assert list(campaign.kept("tiny", elsewhere)) == ["a"]
    Path(moved[0]).write_text("other\n" * 150, "utf-8")
    assert campaign.kept("tiny", elsewhere) == {}


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 5})
    assert campaign._places(9) == [{3}, {4}, {5}]
    assert campaign._places(2) == [{3, 5}, {4}]
    assert campaign._places(1) == [{3, 4, 5}]
    monkeypatch.setattr(campaign.jax, "default_backend", lambda: "gpu")
    assert campaign._places(2) == [{3, 4, 5}]


def test_an_unknown_run_is_refused(configs: dict[str, Config], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--only c: unknown; known are a, b"):
        campaign.study("tiny", configs, lambda *_: {}, no_summary, tmp_path, only=["b", "c"])


@pytest.mark.long
def test_a_training_that_fails_ends_the_study(configs: dict[str, Config], tmp_path: Path) -> None:
    data = replace(configs["a"].data, train=(f"{tmp_path}/missing.tsv",))
    with pytest.raises(SystemExit, match=r"bad\.log: training ended with status 2"):
        list(campaign.train_each({"bad": replace(configs["a"], data=data)}, tmp_path))
