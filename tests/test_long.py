"""From a command line to a model that has learnt: minutes, so `make ci-long` only."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_the_quickstart_learns_the_grammar(tmp_path: Path) -> None:
    """At least 90 % of seen and 85 % of new combinations exactly right."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}

    def program(*arguments: str) -> str:
        command = [sys.executable, "-m", "transformer_jax.cli", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run = f"--run={tmp_path / 'quickstart'}"
    program("train", "--config=configs/quickstart.py", run)
    program("train", "--config=configs/quickstart.py", run)  # nothing is left to do
    data = ("--data", "grammar:test_seen", "grammar:test_new")
    scores = [json.loads(line) for line in program("evaluate", run, *data, "--json").splitlines()]
    exact = {score["corpus"]: score["exact"] for score in scores}
    assert exact["grammar:test_seen"] >= 0.90, exact
    assert exact["grammar:test_new"] >= 0.85, exact
