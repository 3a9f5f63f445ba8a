"""The runs of a study, trained side by side."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tools.campaign import train_all
from tools.measured import measure
from transformer_jax.config import Config
from transformer_jax.text.corpus import Corpus


@pytest.mark.long
def test_runs_are_trained_continued_and_measured(tiny_config: Config, tmp_path: Path) -> None:
    short, cores = replace(tiny_config.train, steps=4), os.sched_getaffinity(0)
    configs = {
        name: replace(tiny_config, train=replace(short, seed=seed))
        for name, seed in (("a", 0), ("b", 1))
    }
    train_all(configs, tmp_path)
    longer = {name: replace(c, train=replace(c.train, steps=6)) for name, c in configs.items()}
    runs = train_all(longer, tmp_path)
    assert "continuing run" in (tmp_path / "a.log").read_text("utf-8")
    assert os.sched_getaffinity(0) == cores
    dev = Corpus(tiny_config.data.dev[0])
    found = {name: measure(run, dev, dev, "de")[0] for name, run in runs.items()}
    assert [found[name]["seed"] for name in configs] == [0, 1]
    assert found["a"]["steps"] == 6
    assert found["a"]["target_tokens"] > 100
    assert found["a"]["card"]["config"]["train"]["steps"] == 6


@pytest.mark.long
def test_a_training_that_fails_ends_the_study(tiny_config: Config, tmp_path: Path) -> None:
    data = replace(tiny_config.data, train=(f"{tmp_path}/missing.tsv",))
    with pytest.raises(SystemExit, match=r"bad\.log: training ended with status 2"):
        train_all({"bad": replace(tiny_config, data=data)}, tmp_path)
