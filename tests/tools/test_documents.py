"""What is written agrees with the code and the result files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tools import documents
from transformer_jax.benchmark import results

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_documents_are_up_to_date() -> None:
    """`make readme` brings them up to date."""
    texts = [document.read_text("utf-8") for document in documents.DOCUMENTS]
    assert {*re.findall(r"<!-- (\w+) -->", "".join(texts))} - {"end"} == set(documents.PARTS)
    assert [documents.update(text) for text in texts] == texts


def test_any_document_may_have_any_part() -> None:
    names = {document.name for document in documents.DOCUMENTS}
    assert {"README.md", *(path.name for path in (ROOT / "docs").glob("*.md"))} == names
    assert documents.update("a\n<!-- layers -->\nold\n<!-- end -->\nb") == (
        f"a\n<!-- layers -->\n{documents.layers()}\n<!-- end -->\nb"
    )


def test_every_module_says_what_it_is() -> None:
    modules = [
        path for folder in ("transformer_jax", "tools") for path in Path(folder).rglob("*.py")
    ]
    assert [path for path in modules if not documents.first_line(path)] == []


def test_the_tree_names_what_there_is() -> None:
    listed = [line for line in documents.tree().splitlines() if not line.startswith("```")]
    assert all(len(line.split(maxsplit=1)) == 2 for line in listed)
    names = {line.split()[0] for line in listed}
    packages = {f"{path.parent.name}/" for path in Path("transformer_jax").glob("*/__init__.py")}
    assert packages <= names
    for name in documents.OTHER_FILES:
        assert Path(name).exists(), name


def test_ratios_have_their_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"forward": {"1": {"64": 0.5}}, "both": {"8": {"64": 2}}}
    spread = {"forward": {"1": {"64": [0.4, 0.625]}}, "both": {"8": {"64": [1, 3]}}}
    found = {
        "ratio_to_torch": values,
        "ratio_to_torch_spread": spread,
        "ratio_to_torch_causal": {},
        "ratio_to_torch_causal_spread": {},
    }
    monkeypatch.setattr(documents.results, "read", {"attention": found}.get)
    line = "| 64 | 0.50 (0.40 to 0.62) |  |  | 2.00 (1.00 to 3.00) |"
    assert documents.attention().splitlines()[2:] == [line]


def test_a_seed_that_is_not_trained_has_an_empty_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        f"first_{seed}": {"bleu_lower_tokenized": 38.0 + seed, "bleu_cased_13a": 37.0 + 2 * seed}
        for seed in range(3)
    }
    rows["recipe_1"] = {"bleu_lower_tokenized": 41.0, "bleu_cased_13a": 40.5}
    monkeypatch.setattr(documents.results, "read", {"multi30k_seeds": {"rows": rows}}.get)
    assert documents.multi30k_seeds().splitlines()[2:] == [
        "| the recipe |  | 41.00 / 40.50 |  |  |",
        "| the recipe before | 38.00 / 37.00 | 39.00 / 39.00 | 40.00 / 41.00 "
        "| 39.00 ± 1.00 / 39.00 ± 2.00 |",
    ]
    found = {"rows": rows, "bootstrap": [{"bleu": {"p_value": 0.0125}}] * 3}
    monkeypatch.setattr(documents.results, "read", {"multi30k_seeds": found}.get)
    last = "| p of the cased scores | 0.013 | 0.013 | 0.013 |  |"
    assert documents.multi30k_seeds().splitlines()[-1] == last


def test_the_score_of_multi30k_is_the_mean_of_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = ("lower_tokenized", "cased_13a", "chrf", "minutes")
    signatures = {"bleu": "tok:13a", "bleu_lower_tokenized": "nrefs:1|tok:none", "chrf": "nc:6"}
    run = {"signatures": signatures, "parameters": 2_000_000}
    found = {
        "seeds": [0, 1],
        "machine": {"cores": 2, "processor": "a chip"},
        **{f"mean_{score}": 40.0 + i for i, score in enumerate(scores)},
        **{f"deviation_{score}": 0.25 + i for i, score in enumerate(scores)},
        "rows": {f"recipe_{seed}": run | {"target_tokens": 4e7 + seed * 2e7} for seed in (0, 1)},
    }
    monkeypatch.setattr(documents.results, "read", {"multi30k_seeds": found}.get)
    assert documents.multi30k_line().startswith("**40.00 ± 0.25 BLEU** on Multi30k")
    assert documents.multi30k().splitlines() == [
        "| Multi30k English-German, test_2016_flickr, mean ± deviation of 2 seeds | this project "
        "| published |",
        "| --- | --- | --- |",
        "| BLEU, lower-cased and tokenized (`nrefs:1\\|tok:none`) | 40.00 ± 0.25 "
        "| 41.02 (Wu et al. 2021, 2.6 million parameters) |",
        "| BLEU, cased (`tok:13a`), and chrF2 (`nc:6`) | 41.00 ± 1.25, 42.00 ± 2.25 "
        "| BLEU 36.99 ± 0.24 (7.6 million parameters) |",
        "| training of 2,000,000 parameters on 50.0 million target tokens, "
        "each on one of 2 CPU cores (a chip) "
        "| 43 ± 3 minutes |  |",
    ]


def test_the_published_settings_stand_beside_the_mean_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def row(bleu: float, minutes: float) -> dict[str, float]:
        scores = {"bleu_lower_tokenized": bleu + 0.5, "bleu_cased_13a": bleu}
        return {**scores, "parameters": 2.62e6, "target_tokens": 45.3e6, "minutes": minutes}

    found = {
        "multi30k_seeds": {
            "seeds": [0, 1],
            "rows": {
                "recipe_0": row(30, 100),
                "recipe_1": row(40, 200),
                "first_0": row(10, 10),
            },
        },
        "multi30k_published": {"rows": {"published_0": row(20, 250.4)}},
    }
    monkeypatch.setattr(documents.results, "read", found.get)
    assert documents.multi30k_published().splitlines()[2:] == [
        "| the recipe, mean of 2 seeds | 35.50 / 35.00 | 2.6 million | 45.3 million | 150 |",
        "| the settings of Wu et al. 2021, one seed | 20.50 / 20.00 | 2.6 million "
        "| 45.3 million | 250 |",
    ]


def test_few_pairs_have_a_column_for_each_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(bleu: float) -> dict[str, float]:
        return {"bleu_lower_tokenized": bleu + 0.5, "bleu_cased_13a": bleu}

    rows = {"recipe_10000": row(30), "smaller_3000": row(20), "recipe_3000": row(10)}
    monkeypatch.setattr(documents.results, "read", {"small_data": {"rows": rows}}.get)
    assert documents.multi30k_few().splitlines() == [
        "| lower-cased tokenized / cased | 3,000 pairs | 10,000 pairs |",
        "| --- | --- | --- |",
        "| the recipe, with a sixth of its steps | 10.50 / 10.00 | 30.50 / 30.00 |",
        "| the same, with 1,000 BPE ids | 20.50 / 20.00 |  |",
    ]


def test_what_libreoffice_keeps_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "bleu_lower_tokenized": 43.0,
        "bleu_cased_13a": 42.0,
        "chrf": 67.0,
        "minutes": 52.4,
        "parameters": 3_000_000,
        "target_tokens": 13e6,
        "machine": {"cores": 2, "processor": "a chip"},
        "kept": {"placeholders": {"lines": 6, "kept": 5, "share": 5 / 6}},
    }
    monkeypatch.setattr(documents.results, "read", {"libreoffice_en_de": found}.get)
    assert "| lines that keep their placeholders | 5 of 6 |" in documents.libreoffice().splitlines()


def test_what_trained_and_measured_a_result_is_named() -> None:
    machine = {"cores": 1, "processor": "a chip", "accelerators": []}
    assert documents._processor({"machine": machine}) == "1 CPU core (a chip)"
    gpus = machine | {"accelerators": ["GPU", "GPU"]}
    assert documents._processor({"machine": gpus}) == "2 GPU"
    for platform, named in (("cpu", "1 CPU core (a chip)"), ("gpu", "8 H200")):
        devices = {"count": 8, "platform": platform, "kind": "H200"}
        found = {"machine": machine, "card": {"provenance": {"devices": devices}}}
        assert documents._processor(found) == named
    versions = {"python": "3.12", "jax": "0.11", "flax": "0.12"}
    found = {"versions": versions, "card": {"provenance": {"versions": versions | {"jax": "0.12"}}}}
    assert documents._versions(found) == "Python 3.12, JAX 0.12, Flax 0.12"


def test_a_change_is_called_better_or_worse_once_all_are_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def row(val: float, test: float) -> dict[str, Any]:
        losses = [{"step": 1, "loss": test / 10}, {"step": 2, "loss": 9.0}]
        return {"val_bleu": val, "bleu_cased_13a": test, "best_step": 1, "evaluations": losses}

    rows = {f"{name}_{seed}": row(38, 36 + seed) for name in ("recipe", "adam") for seed in (0, 1)}
    found: dict[str, Any] = {"rows": rows | {"r_drop_0": row(37.5, 35)}}
    monkeypatch.setattr(documents.results, "read", {"ablations": found}.get)
    assert documents.multi30k_ablations().splitlines()[2:] == [
        "| the recipe | 38.00 | 38.00 |  |  | 3.650 | 36.50 |",
        "| `r_drop` | 37.50 |  |  |  | 3.500 | 35.00 |",
        "| `adam` | 38.00 | 38.00 |  |  | 3.650 | 36.50 |",
    ]
    found["changes"] = {"adam": {"difference": -0.25, "verdict": "none"}}
    assert (
        "| `adam` | 38.00 | 38.00 | -0.25 | none | 3.650 | 36.50 |"
        in documents.multi30k_ablations()
    )


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.json")), ids=lambda p: p.stem)
def test_every_result_has_the_header(path: Path) -> None:
    found = json.loads(path.read_text("utf-8"))
    assert tuple(found)[: len(results.HEADER)] == results.HEADER
    assert re.fullmatch("[0-9a-f]{40}", found["commit"])


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebooks_hold_no_outputs(path: Path) -> None:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


@pytest.mark.parametrize("document", documents.DOCUMENTS, ids=lambda p: p.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text("utf-8")):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", documents.DOCUMENTS, ids=lambda p: p.name)
def test_tests_that_are_named_exist(document: Path) -> None:
    for path in re.findall(r"`(tests/[\w/]+\.py)`", document.read_text("utf-8")):
        assert (ROOT / path).exists(), path
