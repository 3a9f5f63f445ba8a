"""The studies: their configs are those of the committed cards, and so are their scores."""

from dataclasses import replace
from pathlib import Path

import pytest

from tools.scores import kept
from tools.studies import STUDIES
from tools.study import outputs_file
from transformer_jax.benchmark import results
from transformer_jax.config import Config, differences, from_json
from transformer_jax.decoding.evaluation import score
from transformer_jax.text.files import read_lines
from transformer_jax.training.setup import check_config


@pytest.mark.parametrize("name", STUDIES)
def test_configs_are_those_of_the_committed_cards(name: str) -> None:
    configs, trained = STUDIES[name].configs(), (results.FOLDER / f"{name}.json").exists()
    stored = results.read(name) if trained else {"rows": {}}
    for label, row in stored.get("rows", {"": stored}).items():
        if "card" in row:
            config: Config = from_json(row["card"]["config"])
            data = replace(config.data, cache=configs[label].data.cache)
            assert differences(replace(config, data=data), configs[label], all_fields=True) == []
    for config in configs.values():
        check_config(config)


@pytest.mark.parametrize("name", [name for name, study in STUDIES.items() if study.keep_outputs])
def test_the_committed_translations_have_the_scores_of_the_result(name: str) -> None:
    data, stored = STUDIES[name].data, results.read(name)
    if not Path(data.folder).is_dir():
        pytest.skip(f"needs {data.folder}, which is not part of the project")
    sources, references = data.sides(data.test)
    for label, stated in stored.get("rows", {"": stored}).items():
        lines = list(read_lines(str(outputs_file(name, label, data.test))))
        scores = score(lines, [references], data.language)
        assert scores["bleu_lower_tokenized"] == pytest.approx(stated["bleu_lower_tokenized"])
        assert scores["bleu"] == pytest.approx(stated["bleu_cased_13a"])
        assert scores["chrf"] == pytest.approx(stated["chrf"])
        if "kept" in stated:
            assert kept(sources, references, lines) == stated["kept"]
