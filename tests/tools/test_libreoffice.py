"""The translations of LibreOffice's help: what they keep, and their scores."""

from pathlib import Path

import pytest

from tools.libreoffice import NAME, kept
from transformer_jax.benchmark import results
from transformer_jax.decoding.evaluation import score
from transformer_jax.text.corpus import Corpus
from transformer_jax.text.files import read_lines

LIBREOFFICE = Path(__file__).parents[3] / "shared" / "data" / "libreoffice"


def test_only_what_the_reference_keeps_too_is_counted() -> None:
    pairs = [
        ("Enter <?> or <?>.", "Geben Sie <?> oder <?> ein."),
        ("Enter <?>.", "Geben Sie <?> ein."),
        ("Press F5, 2.5 times.", "Drücken Sie F5, 2,5 Mal."),  # the reference writes 2,5
        ("Press F5, 3 times.", "Drücken Sie F5, 3 Mal."),
    ]
    outputs = ["Geben Sie <?> ein.", "Geben Sie <?> ein.", "Drücken Sie F5.", "F6, 3 Mal."]
    found = kept(pairs, outputs)
    assert found["placeholders"] == {"lines": 2, "kept": 1, "share": 0.5}
    assert found["numbers"] == {"lines": 1, "kept": 0, "share": 0.0}  # F6 holds a 6
    assert found["function keys"] == {"lines": 2, "kept": 1, "share": 0.5}
    assert kept([("a", "b")], ["b"])["numbers"]["share"] is None


def test_the_committed_translations_have_the_scores_of_the_result() -> None:
    if not LIBREOFFICE.is_dir():
        pytest.skip("needs LibreOffice's help in ../shared/data, which is not part of the project")
    pairs = list(Corpus(str(LIBREOFFICE / "dev.en-de.tsv.gz")).pairs())
    outputs = list(read_lines(str(results.FOLDER / f"{NAME}.dev.txt")))
    stated, found = results.read(NAME), score(outputs, [target for _, target in pairs], "de")
    assert found["bleu_lower_tokenized"] == pytest.approx(stated["bleu_lower_tokenized"])
    assert found["bleu"] == pytest.approx(stated["bleu_cased_13a"])
    assert found["chrf"] == pytest.approx(stated["chrf"])
    assert kept(pairs, outputs) == stated["kept"]
