"""From a command line to a model that has learned: minutes, so `make test-slow` only."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_jax import Translator

ROOT = Path(__file__).parents[1]


def program(*arguments: str, flags: str = "") -> str:
    """The output of a command, run as users run it, with XLA_FLAGS."""
    environment = os.environ | {"XLA_FLAGS": flags}
    command = [sys.executable, "-m", "transformer_jax.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_quickstart_learns_the_grammar(tmp_path: Path) -> None:
    """At least 90 % of seen and 85 % of new combinations exactly right."""
    run = f"--run={tmp_path / 'quickstart'}"
    program("train", "--config=configs/quickstart.py", run)
    program("train", "--config=configs/quickstart.py", run)  # nothing is left to do
    data = ("--data", "grammar:test_seen", "grammar:test_new")
    scores = [json.loads(line) for line in program("evaluate", run, *data, "--json").splitlines()]
    exact = {score["corpus"]: score["exact"] for score in scores}
    assert exact["grammar:test_seen"] >= 0.90, exact
    assert exact["grammar:test_new"] >= 0.85, exact


@pytest.mark.slow
def test_latent_attention_reads_recipes_that_pooling_cannot(tmp_path: Path) -> None:
    """On couples of services that training never joins."""
    scores: dict[str, dict[str, float]] = {}
    for kind in ("latent", "soft"):
        run = f"--run={tmp_path / kind}"
        config = ("--config=configs/recipes.py", f"--config.model.cross-attention.kind={kind}")
        program("train", *config, run)
        scores[kind] = json.loads(program("evaluate", run, "--data", "recipes:test", "--json"))
    assert scores["latent"]["exact"] >= 0.95, scores
    assert scores["soft"]["exact"] <= 0.7, scores
    sentences = [
        "Autosave Instagram photos to your Dropbox folder",
        "Post photos in your Dropbox folder to Instagram",
    ]
    assert Translator.load(tmp_path / "latent")(sentences) == [
        "instagram.new_photo dropbox.save_file",
        "dropbox.new_file instagram.post_photo",
    ]


COPYING = """
from transformer_jax.config import *
def get_config():
    hard = AttentionConfig(kind="hard", layer=0)
    small = dict(layers=1, d_model=64, heads=1, d_ff=128, max_length=32, norm="pre", dropout=0.0)
    linear = dict(schedule="linear", learning_rate=0.003, warmup=150, decay_steps=2000)
    return Config(
        model=ModelConfig(cross_attention=hard, **small),
        tokenizer=TokenizerConfig(vocabulary=320),
        data=DataConfig(
            train=("{0}/train.tsv",), dev=("{0}/dev.tsv",), batch_tokens=2048, shapes=2
        ),
        optimizer=OptimizerConfig(label_smoothing=0.0, **linear),
        train=TrainConfig(steps=2000, evaluate_every=1000, save_every=1000),
        decode=DecodeConfig(beam=1),
    )
"""


@pytest.mark.slow
def test_hard_attention_learns_to_copy(tmp_path: Path) -> None:
    """Its one layer picks one position of the source at a time: only right picks copy."""
    draw = random.Random(0)
    words = [a + b for a in "bdfgklmn" for b in "aeiou"]
    for name, count in (("train", 20_000), ("dev", 300)):
        lines = (" ".join(draw.choices(words, k=draw.randint(3, 8))) for _ in range(count))
        (tmp_path / f"{name}.tsv").write_text("".join(f"{x}\t{x}\n" for x in lines), "utf-8")
    (tmp_path / "copy.py").write_text(COPYING.format(tmp_path), "utf-8")
    program("train", f"--config={tmp_path / 'copy.py'}", f"--run={tmp_path / 'run'}")
    scores = json.loads(program("evaluate", f"--run={tmp_path / 'run'}", "--json"))
    assert scores["exact"] >= 0.99, scores
