"""The studies: their configs are those of the committed cards, and their summaries are right."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tools import studies
from tools.scores import Data, kept
from tools.studies import STUDIES
from tools.study import outputs_file
from transformer_jax.benchmark import results
from transformer_jax.config import Config, differences, from_json
from transformer_jax.decoding.evaluation import score
from transformer_jax.text.corpus import Corpus
from transformer_jax.text.files import read_lines
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


@pytest.mark.parametrize("name", [name for name, study in STUDIES.items() if study.keep_outputs])
def test_the_committed_translations_have_the_scores_of_the_result(name: str) -> None:
    data, stored = STUDIES[name].data, results.read(name)
    if not Path(data.folder).is_dir():
        pytest.skip(f"needs {data.folder}, which is not part of the project")
    sources, references = data.sides(data.test)
    for label, stated in stored.get("rows", {"": stored}).items():
        lines = list(read_lines(str(outputs_file(name, label or data.test))))
        scores = score(lines, [references], data.language)
        assert scores["bleu_lower_tokenized"] == pytest.approx(stated["bleu_lower_tokenized"])
        assert scores["bleu"] == pytest.approx(stated["bleu_cased_13a"])
        assert scores["chrf"] == pytest.approx(stated["chrf"])
        if "kept" in stated:
            assert kept(sources, references, lines) == stated["kept"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["multi30k_seeds", "ablations"])
def test_summaries_are_those_of_the_committed_rows(name: str) -> None:
    """The summary of the seeds includes a paired bootstrap, which is slow."""
    study, stored = STUDIES[name], results.read(name)
    if not Path(study.data.folder).is_dir():
        pytest.skip(f"needs {study.data.folder}, which is not part of the project")
    summary = json.loads(json.dumps(study.summarize(stored["rows"], study.data)))
    assert summary == {key: stored[key] for key in summary}


def test_the_reverse_run_sees_the_few_pairs_and_translates_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [(f"a {i}", f"ein {i}") for i in range(5)]
    for part in ("train", "val"):
        (tmp_path / f"{part}.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in pairs), "utf-8")
    monkeypatch.setattr(studies, "FILES", tmp_path)
    monkeypatch.setattr(studies, "FEW", (3,))
    studies.write_few_pairs(Data(str(tmp_path), "{folder}/{part}.tsv"))
    few = list(Corpus(f"{tmp_path}/3.tsv").pairs())
    assert list(Corpus(f"{tmp_path}/3.de-en.tsv").pairs()) == [(t, s) for s, t in few]
    rest = (tmp_path / "3.rest.de").read_text("utf-8").splitlines()
    assert sorted([*rest, *(target for _, target in few)]) == [target for _, target in pairs]
    train, translate = studies.back_translation(3)
    assert f"--config.data.train={tmp_path}/3.de-en.tsv" in train
    assert {train[2], f"--pairs={tmp_path}/3.tsv", f"--text={tmp_path}/3.rest.de"} < {*translate}
    back = STUDIES["small_data"].rows["back_3000"]["data.train"][1]
    assert f"--output={back}" in STUDIES["small_data"].before["back_3000"][1]
