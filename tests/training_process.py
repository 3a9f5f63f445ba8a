"""Training in a process of its own, and the comparison of what it leaves."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tools.common import config_file
from transformer_jax.config import Config
from transformer_jax.runs import checkpoint, run
from transformer_jax.training.reporters import read_metrics


def assert_same(made: run.Run, whole: run.Run) -> None:
    """Both have trained to the same bits, and have the same metrics but for times."""
    for tree in ("weights", "training"):
        pair = [checkpoint.restore(each.checkpoints, 12, tree) for each in (made, whole)]
        jax.tree.map(np.testing.assert_array_equal, *pair)
    assert records(made) == records(whole)


def records(made: run.Run) -> list[dict[str, Any]]:
    """The metrics of a run without those that depend on time or on when it is to end."""
    timed = {"tokens_per_s", "mfu", "minutes", "seconds_left", "done"}
    found = read_metrics(made.folder / "metrics.jsonl")
    return [{k: v for k, v in each.items() if k not in timed} for each in found]


def begin(
    config: Config, folder: Path, *options: str, program: str = ""
) -> tuple[subprocess.Popen[str], Path]:
    """A process that trains, after `program`, without compiled programs of others; and a file."""
    code = f"{program}\nfrom transformer_jax.cli.main import main; main()"
    there = folder.with_suffix(".now")
    devices = os.environ["XLA_FLAGS"]
    if "--processes=2" in options:
        devices = devices.replace("device_count=8", "device_count=2")
    changes = {"XLA_FLAGS": devices, "XDG_CACHE_HOME": str(folder.with_suffix(".cache"))}
    command = ["train", f"--config={config_file(config, folder.with_suffix('.py'))}"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command, f"--run={folder}", *options],
        env=os.environ | changes | {"NOW": str(there)},
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, there


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


WHILE_SAVING = """
import os, pathlib, time
from transformer_jax.runs import manifest
write = manifest.write
def wait(checkpoint, step, best):
    if step == 8:
        now = pathlib.Path(os.environ["NOW"])
        now.touch()
        while now.exists():
            time.sleep(0.05)
    write(checkpoint, step, best)
manifest.write = wait
"""
"""Makes a file once the checkpoint of step 8 is to be made whole, which waits for its deletion."""
