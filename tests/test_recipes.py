"""The recipes for real sizes plan at full size, and train; minutes, so `make test-slow` only."""

import random
import re
from functools import partial
from pathlib import Path

import pytest
from common import ONE_DEVICE
from test_long import program

from transformer_jax.config import load_config_file
from transformer_jax.models.make import count_parameters
from transformer_jax.runs import run

RECIPES = sorted(Path("configs").glob("*14_*.py"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options that name generated text, of enough words for the largest vocabulary."""
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    syllables = [a + b for a in "bcdfghjklmnprstvwz" for b in ("a", "e", "i", "o", "u", "an", "er")]
    words = ["".join(draw.choices(syllables, k=draw.randint(2, 5))) for _ in range(50_000)]
    for name, count in (("train", 12_000), ("dev", 4)):
        lines = (" ".join(draw.choices(words, k=draw.randint(4, 16))) for _ in range(count))
        (folder / f"{name}.tsv").write_text("".join(f"{x}\t{x}\n" for x in lines), "utf-8")
    return (
        f"--config.data.train={folder / 'train.tsv'}",
        f"--config.data.dev={folder / 'dev.tsv'}",
        f"--config.data.cache={folder / 'cache'}",
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_plan_at_full_size_and_train(
    path: Path, data: tuple[str, ...], tmp_path: Path
) -> None:
    """With one layer, 3 steps of 512 tokens."""
    config, run_program = load_config_file(path), partial(program, flags=ONE_DEVICE["XLA_FLAGS"])
    text = run_program("inspect", f"--config={path}", *data, "--devices=8")
    vocabulary = config.tokenizer.vocabulary
    assert f"\nparameters  {count_parameters(config.model, vocabulary, vocabulary):,}\n" in text
    assert re.search(r"\nmemory      ", text)
    small = ("--config.model.layers=1", "--config.data.batch-tokens=512", "--config.train.steps=3")
    run_program("train", f"--config={path}", *data, *small, f"--run={tmp_path / 'run'}")
    assert run.load(tmp_path / "run").best_step() == 3
