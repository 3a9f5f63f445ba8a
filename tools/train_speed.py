"""Compares the speed of training on a CPU with PyTorch's, and with one device for each core.

    python -m tools.train_speed [--data FOLDER] [--only CASE ...]

FOLDER is that of Multi30k. Each case is measured beside PyTorch in one process. Then processes with
each of `VARIANTS` take turns. Writes results/train_speed.json.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

from tools.common import spread
from tools.studies import MULTI30K, STUDIES
from transformer_jax.allocator import restart_with_allocator
from transformer_jax.benchmark import results
from transformer_jax.benchmark.timing import Samples, time_in_turns, timer
from transformer_jax.benchmark.training import (
    PRESETS,
    Workload,
    count_tokens,
    full_rows,
    measure,
    passes,
    real_text,
)
from transformer_jax.data.buckets import Shape

SHAPE, BATCHES = Shape(128, 32, 32), 8
"""The batch of random ids, and the number of batches of text."""
TURNS, SAMPLES = 5, 3
"""Turns of processes, and passes of each over its batches, whose median counts."""
CACHE = Path("runs/train_speed")
"""Compiled programs of all turns."""
VARIANTS = {
    "one device": "",
    "a device for each core": (
        "--xla_force_host_platform_device_count={cores} --xla_cpu_multi_thread_eigen=false"
    ),
}
"""XLA_FLAGS by name."""


def text(folder: str) -> Workload:
    """Returns the first batches of the recipe of Multi30k."""
    data = MULTI30K._replace(folder=folder)
    config = STUDIES["multi30k_en_de"].configs()[""]
    return real_text(config.changed(data={"train": (data.name(data.train),), "dev": ()}), BATCHES)


CASES: dict[str, Callable[[str], Workload]] = {
    "tiny": lambda _: full_rows(PRESETS["tiny"], SHAPE),
    "small": lambda _: full_rows(PRESETS["small"], SHAPE),
    "multi30k": text,
}
"""What makes the batches, from the folder of Multi30k."""


def in_process(case: str, folder: str, flags: str = "", beside: bool = False) -> dict[str, Any]:
    """Returns what is measured in a process of its own: the speed of steps, or all of `measure`."""
    command = [sys.executable, "-m", "tools.train_speed", f"--data={folder}", f"--worker={case}"]
    command += ["--beside"] * beside
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_COMPILATION_CACHE_DIR": str(CACHE)}
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(ended.stdout.splitlines()[-1])


def measure_steps(work: Workload) -> dict[str, Any]:
    """Returns the speed of steps alone."""
    calls, _ = passes(work)
    times = time_in_turns({"": timer(calls["step"])}, SAMPLES)[""]
    return {"tokens_per_s": count_tokens(work.batches)[0] / times.median}


def compare(case: str, folder: str) -> dict[str, Any]:
    """Returns the record of a case beside PyTorch, and the speeds of the variants in turns."""
    record = in_process(case, folder, beside=True)
    cores = len(os.sched_getaffinity(0))
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(TURNS):
        for name, flags in VARIANTS.items():
            turn = in_process(case, folder, flags.format(cores=cores))
            rates[name].append(turn["tokens_per_s"])
            print(case, name, f"{rates[name][-1]:,.0f}", flush=True)
    samples = {name: Samples(tuple(values)) for name, values in rates.items()}
    first = samples["one device"]
    variants = {
        name: {"tokens_per_s": each.median, "ratio": spread(each.over(first))}
        for name, each in samples.items()
    }
    peers = [peer for peer in record["pytorch"] if "ratio" in peer]
    best = max(peers, key=itemgetter("tokens_per_s"), default=None)
    return record | {"variants": variants, "best_pytorch": best}


def main() -> None:
    """Measures the cases, and writes the result file as soon as each is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=MULTI30K.folder, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work = CASES[options.worker](options.data)
        print(json.dumps(measure(work, TURNS) if options.beside else measure_steps(work)))
        return
    path = results.FOLDER / "train_speed.json"
    cases = results.read("train_speed")["cases"] if path.exists() else {}
    for case in options.only:
        cases[case] = results.origin() | compare(case, options.data)
        print(results.write("train_speed", "make measure NAME=train_speed", {"cases": cases}))


if __name__ == "__main__":
    restart_with_allocator()
    main()
