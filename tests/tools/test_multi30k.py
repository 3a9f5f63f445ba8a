"""The committed translations of Multi30k's test set have the scores that results state."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tools.multi30k import TEST
from tools.seeds import NAME as SEEDS
from tools.seeds import outputs_file
from transformer_jax.benchmark import results
from transformer_jax.decoding.evaluation import score
from transformer_jax.text.files import read_lines

MULTI30K = Path(__file__).parents[3] / "shared" / "data" / "multi30k"


def committed() -> dict[str, tuple[str, Path, Mapping[str, Any]]]:
    """Returns the language, the translations and the scores of each result."""
    found: dict[str, tuple[str, Path, Mapping[str, Any]]] = {}
    for language in ("de", "fr"):
        name = f"multi30k_en_{language}"
        found[name] = language, results.FOLDER / f"{name}.{TEST}.txt", results.read(name)
    for label, row in results.read(SEEDS)["rows"].items():
        found[f"{SEEDS}.{label}"] = "de", outputs_file(label), row
    return found


@pytest.mark.parametrize("name", committed())
def test_the_committed_translations_have_the_scores_of_the_result(name: str) -> None:
    if not MULTI30K.is_dir():
        pytest.skip("needs Multi30k in ../shared/data, which is not part of the project")
    language, outputs, stated = committed()[name]
    references = list(read_lines(str(MULTI30K / f"{TEST}.{language}.gz")))
    found = score(list(read_lines(str(outputs))), references, language)
    assert found["bleu_lower_tokenized"] == pytest.approx(stated["bleu_lower_tokenized"])
    assert found["bleu"] == pytest.approx(stated["bleu_cased_13a"])
    assert found["chrf"] == pytest.approx(stated["chrf"])
