"""The trained model in models/ is the one that results/model.json describes."""

import shutil
from pathlib import Path

import pytest
from common import Capture, error_line

from tools import model, scores
from tools.model import MODEL
from tools.studies import LIBREOFFICE
from transformer_jax import Translator
from transformer_jax.benchmark import results


def test_its_files_have_their_digest() -> None:
    assert model.digest(model.model_files()) == results.read("model")["sha256"]


def test_it_translates() -> None:
    samples = results.read("model")["samples"]["best"]
    sources, outputs = ([sample[name] for sample in samples] for name in ("source", "output"))
    assert scores.texts(Translator.load(MODEL), sources) == outputs


@pytest.mark.slow
def test_its_score() -> None:
    if not Path(LIBREOFFICE.folder).exists():
        pytest.skip(f"{LIBREOFFICE.folder}: the corpus is not here")
    measured, stored = model.scored(*LIBREOFFICE.sides(LIBREOFFICE.test)), results.read("model")
    assert measured["bleu"] == pytest.approx(stored["int8"]["bleu"], abs=0.3)
    assert measured["bleu"] > stored["bleu_cased_13a"] - 0.5  # of the float32 weights


def test_a_damaged_copy_is_refused(tmp_path: Path, capsys: Capture) -> None:
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    largest = max(folder.rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    contents = bytearray(largest.read_bytes())
    contents[len(contents) // 2] ^= 1
    largest.write_bytes(contents)
    line = error_line(["translate", f"--run={folder}", "--input=/dev/null"], capsys)
    assert largest.name in line
