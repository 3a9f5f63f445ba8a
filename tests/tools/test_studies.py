"""The studies: their configs are those of the committed cards, and so are their scores."""

from dataclasses import replace
from pathlib import Path

import pytest

from tools.studies import STUDIES
from transformer_jax.benchmark import results
from transformer_jax.config import Config, differences, from_json
from transformer_jax.training.setup import check_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", STUDIES)
def test_configs_are_those_of_the_committed_cards(name: str) -> None:
    configs, stored = STUDIES[name].configs(), results.read(name)
    for label, row in stored.get("rows", {"": stored}).items():
        if "card" in row:
            config: Config = from_json(row["card"]["config"])
            data = replace(config.data, cache=configs[label].data.cache)
            assert differences(replace(config, data=data), configs[label], all_fields=True) == []
    for config in configs.values():
        check_config(config)
