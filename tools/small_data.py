"""Trains on 3,000, 10,000 and 29,000 pairs of Multi30k, and with back-translation.

    python -m tools.small_data --data ../shared/data/multi30k

Each run has a sixth of the steps of the recipe, which is enough for few pairs. Models from German
to English, trained on the same few pairs, translate the German sides of the pairs that are left
out; half of the pairs that training then draws are those. Writes results/small_data.json and .svg.
"""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.campaign import Rows, arguments, study, train_each
from tools.measured import measure
from tools.multi30k import TEST, corpus, recipe, shortened
from transformer_jax import plot
from transformer_jax.allocator import restart_with_allocator
from transformer_jax.benchmark import results
from transformer_jax.config import Config
from transformer_jax.files import write_whole
from transformer_jax.parallel.program_cache import cache_programs
from transformer_jax.runs.run import Run
from transformer_jax.text.corpus import Corpus, Pair

FEW = (3_000, 10_000)
FOLDER = Path("runs/small")
PART = 6
SMALLER = {3_000: 1_000}
"""Vocabulary that is also tried, by number of pairs."""

WAYS = {"recipe": "the recipe", "smaller": "1,000 BPE ids", "back": "back-translation"}
"""What the runs of a way, named WAY_PAIRS, are called in the picture."""


def write_pairs(path: Path, pairs: list[Pair]) -> str:
    """Writes a corpus, if it is not there, and returns its name."""
    if not path.exists():
        with write_whole(path) as file:
            file.writelines(f"{source}\t{target}\n" for source, target in pairs)
    return str(path)


def without_back_translation(full: Config, pairs: list[Pair]) -> dict[str, Config]:
    """Returns the configs that need no back-translation, and writes their corpora."""
    found = {"recipe_29000": full}
    for count in FEW:
        few = write_pairs(FOLDER / f"{count}.tsv", pairs[:count])
        config = replace(full, data=replace(full.data, train=(few,)))
        found[f"recipe_{count}"] = config
        if count in SMALLER:
            smaller = replace(full.tokenizer, vocabulary=SMALLER[count])
            found[f"smaller_{count}"] = replace(config, tokenizer=smaller)
    return found


def reverse(config: Config, data: Path, pairs: list[Pair]) -> Config:
    """Returns the config of the other direction, and writes its corpora."""
    few = [(target, source) for source, target in pairs]
    dev = [(target, source) for source, target in corpus(data, "val").pairs()]
    names = (
        (write_pairs(FOLDER / f"{len(few)}.de-en.tsv", few),),
        (write_pairs(FOLDER / "val.de-en.tsv", dev),),
    )
    return replace(config, data=replace(config.data, train=names[0], dev=names[1]))


def with_back_translation(config: Config, count: int) -> Config:
    """Returns the config with the few pairs, and as many that the reverse run makes."""
    (few,) = config.data.train
    data = replace(config.data, train=(few, str(made_pairs(count))), weights=(1.0, 1.0))
    return replace(config, data=data)


def made_pairs(count: int) -> Path:
    """Returns the file of the pairs that the reverse run of `count` pairs makes."""
    return FOLDER / f"{count}.back.tsv"


def back_translate(count: int, pairs: list[Pair]) -> None:
    """Makes pairs of the German sides that are left out of `count` pairs, if they are not there."""
    text, made = FOLDER / f"{count}.rest.de", made_pairs(count)
    if not made.exists():
        with write_whole(text) as file:
            file.writelines(f"{target}\n" for _, target in pairs[count:])
        command = (sys.executable, "-m", "transformer_jax.cli.main", "back-translate")
        options = (f"--run={FOLDER / f'reverse_{count}'}", f"--text={text}")
        few = f"--pairs={FOLDER / f'{count}.tsv'}"
        subprocess.run((*command, *options, few, f"--output={made}"), check=True)


def curves(rows: Rows) -> dict[str, Any]:
    """Returns BLEU by the number of pairs, for each way of training, as `plot.lines` takes them."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for name, values in rows.items():
        way, _, count = name.partition("_")
        lines.setdefault(WAYS[way], []).append((int(count), values["bleu_cased_13a"]))
    panels = {"BLEU, cased, 13a": {way: sorted(points) for way, points in lines.items()}}
    return {"panels": panels, "x": "training pairs", "xscale": "log"}


def main() -> None:
    """Reads --data, trains, and writes the result file and the picture."""
    restart_with_allocator()
    options = arguments(__doc__)
    data = options.data
    FOLDER.mkdir(parents=True, exist_ok=True)
    pairs = list(Corpus(recipe(data).data.train[0]).pairs())
    random.Random(0).shuffle(pairs)
    cache_programs()
    configs = without_back_translation(shortened(recipe(data), PART), pairs)
    few = {count: configs[f"recipe_{count}"] for count in FEW}
    chosen = [count for count in FEW if not options.only or f"back_{count}" in options.only]
    backward = {f"reverse_{n}": reverse(few[n], data, pairs[:n]) for n in chosen}
    for label, _ in train_each(backward, FOLDER):
        print(f"{FOLDER / label}: trained")
    for count in chosen:
        back_translate(count, pairs)
    configs |= {f"back_{n}": with_back_translation(config, n) for n, config in few.items()}
    dev, test = corpus(data, "val"), corpus(data, TEST)

    def row(_: str, trained: Run) -> dict[str, Any]:
        return measure(trained, dev, test, "de")[0]

    def drawn(rows: Rows) -> dict[str, Any]:
        return {"curves": curves(rows)}

    rows = study("small_data", configs, row, drawn, FOLDER, options.only)
    plot.save(plot.lines(**curves(rows)), results.FOLDER / "small_data.svg")


if __name__ == "__main__":
    main()
