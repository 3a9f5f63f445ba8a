"""Trains the runs of a study, one on each core at a time. The same call continues them."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.common import config_file
from transformer_jax.config import Config
from transformer_jax.runs import run
from transformer_jax.runs.run import Run


def train_all(configs: dict[str, Config], folder: Path) -> dict[str, Run]:
    """Trains each config in `folder`/NAME, with a log beside it, and returns the runs by name.

    A run on one core is slower than on two, but two runs side by side are faster than one after the
    other. After SIGINT or SIGTERM each run is saved. SystemExit: a training has failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    running: dict[str, subprocess.Popen[bytes]] = {}

    def train(name: str) -> None:
        path = config_file(configs[name], folder / f"{name}.py")
        command = (sys.executable, "-m", "transformer_jax.cli.main", "train", f"--config={path}")
        with (folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen((*command, f"--run={folder / name}"), stdout=log, stderr=log)
            running[name] = process
            if status := process.wait():
                sys.exit(f"{folder / name}.log: training ended with status {status}")

    cores: queue.SimpleQueue[int] = queue.SimpleQueue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put(core)
    with ThreadPoolExecutor(cores.qsize(), initializer=_pin, initargs=(cores,)) as pool:
        try:
            list(pool.map(train, configs))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running.values():
                process.terminate()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    return {name: run.load(folder / name) for name in configs}


def _pin(cores: queue.SimpleQueue[int]) -> None:
    """Pins this thread, and the processes that it starts, to a core."""
    os.sched_setaffinity(0, {cores.get()})
