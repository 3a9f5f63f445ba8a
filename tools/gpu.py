"""Checks and measures the project on a GPU, in at most ten minutes.

    python -m tools.gpu

Runs the tests marked `gpu`; times a training step and a decoding step of each preset; stops and
continues a run; compares the kernels of attention. Writes results/gpu.json. Without a GPU it says
so and writes nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import backend

from transformer_jax.benchmark import attention_report, results
from transformer_jax.benchmark.attention import cases, measure, one_device
from transformer_jax.benchmark.settings import AttentionBenchmark
from transformer_jax.benchmark.timing import time_in_turns, timer
from transformer_jax.config import (
    BASE,
    BIG,
    SMALL,
    TINY,
    Config,
    ExecutionConfig,
    ModelConfig,
)
from transformer_jax.data.buckets import Shape
from transformer_jax.decoding.strategies import Lines, make_search
from transformer_jax.parallel.compile import DETERMINISTIC, compile_function
from transformer_jax.parallel.mesh import replicate, shard_batch
from transformer_jax.runs import checkpoint
from transformer_jax.special_ids import PAD
from transformer_jax.training.planning import StepCosts, compile_training_step
from transformer_jax.training.setup import prepare_step
from transformer_jax.types import Batch

BUDGET_S = 540
"""Seconds after which no further case of the attention benchmark begins."""
SAMPLES, MAX_SECONDS = 15, 5.0
"""Samples of each step at most, and the seconds that they take unless they are few."""
TESTS = ("tests/attention", "tests/models", "tests/training")


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    presets: dict[str, Config]
    vocabulary: int
    rows: int
    length: int  # of the sentences on each side
    attention: AttentionBenchmark
    run: str  # config of the run that is stopped in the middle
    steps: int  # of it


def preset(model: ModelConfig, deterministic: bool = False) -> Config:
    """Returns the config that trains and decodes a preset in bfloat16."""
    execution = ExecutionConfig(deterministic=deterministic)
    return Config(model=replace(model, dtype="bfloat16"), execution=execution)


FULL = Sizes(
    presets={
        "tiny": preset(TINY),
        "small": preset(SMALL),
        "base": preset(BASE),
        "base, deterministic": preset(BASE, deterministic=True),
        "big": preset(BIG),
    },
    vocabulary=32_000,
    rows=128,
    length=64,
    attention=AttentionBenchmark(lengths=(256, 1024, 4096), batches=(8,), dtypes=("bfloat16",)),
    run="configs/quickstart.py",
    steps=40,
)
QUICK = Sizes(
    presets={"tiny": preset(replace(TINY, layers=1), deterministic=True)},
    vocabulary=300,
    rows=8,
    length=8,
    attention=AttentionBenchmark(lengths=(16,), batches=(1,), masks=("full",)),
    run="configs/recipes.py",
    steps=2,
)


def run_tests() -> dict[str, int]:
    """Runs the tests marked `gpu`. Returns pytest's status and its counts."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={report}", *TESTS]
        # Set, so that the tests neither ask for a CPU nor compile as on one.
        environment = os.environ | {"JAX_PLATFORMS": "", "XLA_FLAGS": ""}
        status = subprocess.run(command, env=environment).returncode
        suites = ElementTree.parse(report).iter("testsuite") if report.exists() else ()
        names = ("tests", "failures", "errors", "skipped")
        return {"status": status} | {k: int(suite.get(k, 0)) for suite in suites for k in names}


def measure_preset(config: Config, sizes: Sizes) -> dict[str, Any]:
    """Returns the times of a training step and of a step of beam search, on one device."""
    mesh, shape = one_device(), Shape(sizes.rows, sizes.length, sizes.length)
    setup = prepare_step(config, (sizes.vocabulary, sizes.vocabulary), mesh)
    draw = np.random.default_rng(0)
    ids = draw.integers(4, sizes.vocabulary, (3, sizes.rows, sizes.length), np.int32)
    batch, key = shard_batch(Batch(*ids), mesh), replicate(jax.random.key(0), mesh)
    state = compile_function(setup.init, mesh)(key)
    params = jax.tree.map(jnp.copy, state.params)  # a training step reuses the state's memory
    began = time.perf_counter()
    update = compile_training_step(setup, shape)
    compiled = time.perf_counter()
    options = DETERMINISTIC if config.execution.deterministic else None
    lines = Lines(batch.source)
    search = compile_function(make_search([setup.model], config.decode), mesh, options=options)
    search = search.lower([params], lines).compile()
    compile_s = {"training": compiled - began, "decoding": time.perf_counter() - compiled}

    def train() -> None:
        nonlocal state
        state, metrics = update(state, batch, key)
        jax.block_until_ready(metrics)

    def decode() -> Any:
        return jax.block_until_ready(search([params], lines))

    steps = int((np.asarray(decode().ids) != PAD).sum(axis=-1).max())
    calls = {"training": timer(train), "decoding": timer(decode)}
    seconds = {k: v.median for k, v in time_in_turns(calls, SAMPLES, MAX_SECONDS).items()}
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "compile_s": compile_s,
        "training_step_ms": seconds["training"] * 1e3,
        "target_tokens_per_s": sizes.rows * sizes.length / seconds["training"],
        "tflops": StepCosts(setup).flops(shape) / seconds["training"] / 1e12,
        "temporaries_mib": update.memory_analysis().temp_size_in_bytes / 2**20,
        "decoding_step_ms": seconds["decoding"] / steps * 1e3,
        "decoding_steps": steps,
    }


def measure_presets(sizes: Sizes) -> dict[str, Any]:
    """Returns what was measured of each preset, or why it could not be."""
    found: dict[str, Any] = {}
    for name, config in sizes.presets.items():
        try:
            found[name] = measure_preset(config, sizes)
        except RuntimeError as error:  # it does not fit into the memory of this device
            found[name] = {"failed": " ".join(str(error).split())[:200]}
        print(name, found[name], flush=True)
    return found


def resumes_bit_for_bit(config: str, steps: int, deterministic: bool) -> bool:
    """Returns whether a run that was stopped and continued is one that was never stopped.

    config: path of the config file. No process finds the programs of another one, so that each
    compiles and chooses kernels anew.
    """
    with tempfile.TemporaryDirectory() as folder:

        def train(run: str, steps: int, number: int) -> Path:
            command = [sys.executable, "-m", "transformer_jax.cli.main", "train"]
            command += [f"--config={config}", f"--run={folder}/{run}", "--config.data.dev"]
            command += [f"--config.data.cache={folder}/data", f"--config.train.steps={steps}"]
            command += [f"--config.execution.deterministic={deterministic}"]
            cache = {"XDG_CACHE_HOME": f"{folder}/programs_{number}"}
            subprocess.run(command, env=os.environ | cache, check=True)
            return Path(folder) / run / "checkpoints"

        whole = train("whole", steps, 0)
        train("stopped", steps // 2, 1)
        stopped = train("stopped", steps, 2)
        trees = [
            [checkpoint.restore(path, steps, tree) for tree in ("weights", "training")]
            for path in (whole, stopped)
        ]
    return all(map(np.array_equal, *map(jax.tree.leaves, trees)))


def measure_attention(settings: AttentionBenchmark, end: float) -> dict[str, Any]:
    """Returns the records of the kernels and their summary. Begins no case after the time `end`."""
    records: list[attention_report.Record] = []
    left_out = len(list(cases(settings)))
    for case in measure(settings):
        print("\n".join(attention_report.table_lines(case, records[-1:])), flush=True)
        records += case
        left_out -= 1
        if time.monotonic() > end:
            break
    return attention_report.summary(records) | {"cases_left_out": left_out, "records": records}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures everything and writes the result file. Exits with status 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu", help="to run on")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try this program")
    parser.add_argument("--folder", type=Path, default=results.FOLDER, help="of the result file")
    options = parser.parse_args(arguments)
    # Programs share the device's memory here.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if jax.default_backend() != options.platform:
        found = jax.default_backend()
        sys.exit(f"make gpu: JAX finds no {options.platform}, only {found}; docs/multi_device.md")
    began, sizes = time.monotonic(), QUICK if options.quick else FULL
    tests = run_tests()
    presets = measure_presets(sizes)
    resumes = {
        name: resumes_bit_for_bit(sizes.run, sizes.steps, deterministic)
        for name, deterministic in (("deterministic", True), ("default", False))
    }
    print("resumes bit for bit:", resumes, flush=True)
    attention = measure_attention(sizes.attention, began + BUDGET_S)
    found = {
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "platform": backend.get_backend().platform_version,
        "minutes": (time.monotonic() - began) / 60,
        "tests": tests,
        "vocabulary": sizes.vocabulary,
        "rows": sizes.rows,
        "length": sizes.length,
        "presets": presets,
        "resumes_bit_for_bit": resumes,
        "attention": attention,
    }
    print(results.write("gpu", "make gpu", found, options.folder))
    if tests["status"] or not resumes["deterministic"]:
        sys.exit("make gpu: a check has failed")


if __name__ == "__main__":
    main()
