"""Writes a trained run as the model in models/, and scores it.

    python -m tools.model RUN

RUN is one of configs/libreoffice_en_de.py. The development set chooses the length penalty. Writes
models/libreoffice_en_de, with integer weights, and results/model.json.
"""

import dataclasses
import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import tyro

from tools import scores
from tools.common import run_command
from tools.studies import LIBREOFFICE
from transformer_jax import DecodeConfig, Translator
from transformer_jax.allocator import restart_with_allocator
from transformer_jax.benchmark import results
from transformer_jax.decoding.evaluation import score
from transformer_jax.interop import int8
from transformer_jax.parallel.program_cache import cache_programs
from transformer_jax.runs import run as runs

MODEL = Path("models/libreoffice_en_de")
CARD = MODEL / "README.md"
SENTENCE = "Click on the icon to insert a new table in the document."


def write(source: runs.Run, decode: DecodeConfig) -> None:
    """Writes the best parameters of a run, with its search, in place of the model."""
    run = dataclasses.replace(source, config=dataclasses.replace(source.config, decode=decode))
    card = CARD.read_bytes()
    shutil.rmtree(MODEL)
    int8.export(run, run.best_step(), run.params(), MODEL)
    CARD.write_bytes(card)


def model_files() -> dict[str, bytes]:
    """Returns the contents of the model's files by their paths, but for its card."""
    paths = sorted(path for path in MODEL.rglob("*") if path.is_file() and path != CARD)
    return {path.relative_to(MODEL).as_posix(): path.read_bytes() for path in paths}


def digest(contents: Mapping[str, bytes]) -> str:
    """Returns the SHA-256 of what `sha256sum` prints of the files."""
    lines = (f"{hashlib.sha256(x).hexdigest()}  {name}\n" for name, x in contents.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def scored(sources: list[str], references: list[str]) -> dict[str, Any]:
    """Returns the scores of the model."""
    outputs = scores.texts(Translator.load(MODEL), sources)
    values = score(outputs, references)
    return {name: values[name] for name in ("bleu", "chrf")}


def seconds_to_answer() -> dict[str, float]:
    """Returns the seconds of a command that translates a line: the first time, and again."""
    with tempfile.TemporaryDirectory() as cache:
        call = partial(run_command, "translate", f"--run={MODEL}", text=SENTENCE)
        return {name: call(XDG_CACHE_HOME=cache)[1] for name in ("first", "again")}


def main(run: tyro.conf.Positional[str]) -> None:
    """Writes the model and its scores."""
    restart_with_allocator()
    source = runs.load(run)
    cache_programs()
    values, _ = scores.translations(source, LIBREOFFICE)
    write(source, DecodeConfig(**values["search"]))
    contents = model_files()
    values |= {
        "int8": scored(*LIBREOFFICE.sides(LIBREOFFICE.test)),
        "seconds_to_answer": seconds_to_answer(),
        "mib": sum(map(len, contents.values())) / 2**20,
        "sha256": digest(contents),
    }
    results.write("model", "make measure NAME=model TRAINED=RUN", values)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
