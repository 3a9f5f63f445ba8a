"""Checks and measures the project on a GPU, in at most ten minutes.

    python -m tools.gpu

Runs the tests marked `gpu`; times a training step and a decoding step of each preset; stops and
continues a run; compares the kernels of attention. Writes results/gpu.json. Without a GPU it says
so and writes nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import backend

from tools.measure import random_batch, time_steps
from transformer_jax.benchmark import results
from transformer_jax.benchmark.timing import time_in_turns, timer
from transformer_jax.config import BASE, BIG, SMALL, TINY, Config, ExecutionConfig, MeshConfig
from transformer_jax.data.buckets import Shape
from transformer_jax.decoding.strategies import Lines, make_search
from transformer_jax.parallel.compile import DETERMINISTIC, compile_function
from transformer_jax.parallel.mesh import make_mesh, replicate, shard_batch
from transformer_jax.runs import checkpoint
from transformer_jax.special_ids import PAD
from transformer_jax.training.planning import StepCosts
from transformer_jax.training.setup import prepare_step

PRESETS = {
    "tiny": Config(TINY),
    "small": Config(SMALL),
    "base": Config(BASE),
    "base, deterministic": Config(BASE, execution=ExecutionConfig(deterministic=True)),
    "big": Config(BIG),
}
"""Configs that are trained and decoded in bfloat16."""
VOCABULARY, SHAPE = 32_000, Shape(128, 64, 64)
SAMPLES, MAX_SECONDS = 15, 5.0
"""Samples of each step at most, and the seconds that they take unless they are few."""
STOPPED, STEPS = "configs/quickstart.py", 40
"""Config and steps of the run that is stopped in the middle."""
ATTENTION = "--lengths 256 1024 4096 --batches 8 --dtypes bfloat16"
BUDGET_S = 540
"""Seconds after which the benchmark of attention ends, with the cases that it has measured."""
TESTS = ("tests/attention", "tests/models", "tests/training")
CLI = (sys.executable, "-m", "transformer_jax.cli.main")


def run_tests() -> dict[str, Any]:
    """Runs the tests marked `gpu`. Returns pytest's status and its last line."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *TESTS]
    # Set, so that the tests neither ask for a CPU nor compile as on one.
    environment = os.environ | {"JAX_PLATFORMS": "", "XLA_FLAGS": ""}
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    print(ended.stdout, flush=True)
    return {"status": ended.returncode, "summary": ended.stdout.splitlines()[-1]}


def measure_preset(config: Config) -> dict[str, Any]:
    """Returns the times of a training step and of a step of beam search, on one device."""
    config = replace(config, model=replace(config.model, dtype="bfloat16"))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    setup = prepare_step(config, (VOCABULARY, VOCABULARY), mesh)
    batch = shard_batch(random_batch(SHAPE, VOCABULARY), mesh)
    state = compile_function(setup.init, mesh)(replicate(jax.random.key(0), mesh))
    params = jax.tree.map(jnp.copy, state.params)  # a training step reuses the state's memory
    steps = {"training": (setup.compile_update(), state)}
    training = time_steps(steps, batch, SAMPLES, MAX_SECONDS)["training"]

    options = DETERMINISTIC if config.execution.deterministic else None
    search = compile_function(make_search([setup.model], config.decode), mesh, options=options)

    def decode() -> Any:
        return jax.block_until_ready(search([params], Lines(batch.source)))

    began = time.perf_counter()
    decoded = int((np.asarray(decode().ids) != PAD).sum(axis=-1).max())
    first_s = time.perf_counter() - began
    decoding = time_in_turns({"": timer(decode)}, SAMPLES, MAX_SECONDS)[""]
    step_s = training["step_ms"] / 1e3
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "compile_s": {"training": training["compile_s"], "decoding": first_s - decoding.median},
        "training_step_ms": training["step_ms"],
        "target_tokens_per_s": SHAPE.rows * SHAPE.target / step_s,
        "tflops": StepCosts(setup).flops(SHAPE) / step_s / 1e12,
        "temporaries_mib": training["temporaries_mib"],
        "decoding_step_ms": decoding.median / decoded * 1e3,
        "decoding_steps": decoded,
    }


def measure_presets() -> dict[str, Any]:
    """Returns what was measured of each preset, or why it could not be."""
    presets: dict[str, Any] = {}
    for name, config in PRESETS.items():
        try:
            presets[name] = measure_preset(config)
        except RuntimeError as error:  # it does not fit into the memory of this device
            presets[name] = {"failed": " ".join(str(error).split())[:200]}
        print(name, presets[name], flush=True)
    return presets


def resumes_bit_for_bit(deterministic: bool) -> bool:
    """Returns whether a run that was stopped and continued is one that was never stopped.

    No process finds the programs of another one, so that each compiles and chooses kernels anew.
    """
    with tempfile.TemporaryDirectory() as folder:
        weights = []
        for name, lengths in {"whole": [1], "stopped": [2, 1]}.items():
            for part in lengths:
                command = [*CLI, "train", f"--config={STOPPED}", f"--run={folder}/{name}"]
                command += ["--config.data.dev", f"--config.data.cache={folder}/data"]
                command += [f"--config.execution.deterministic={deterministic}"]
                command += [f"--config.train.steps={STEPS // part}"]
                cache = {"XDG_CACHE_HOME": f"{folder}/{name}_{part}"}
                subprocess.run(command, env=os.environ | cache, check=True)
            path = Path(folder, name, "checkpoints")
            trees = [checkpoint.restore(path, STEPS, x) for x in ("weights", "training")]
            weights.append(jax.tree.leaves(trees))
    return all(map(np.array_equal, *weights))


def measure_attention(seconds: float) -> dict[str, Any]:
    """Returns what `bench attention` measures within a time limit in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*CLI, "bench", "attention", *ATTENTION.split(), f"--out={folder}/attention"]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(command, check=True, timeout=max(seconds, 60))
        measured = json.loads(Path(folder, "attention.json").read_text("utf-8"))
    return {key: value for key, value in measured.items() if key not in results.HEADER}


def measure() -> dict[str, Any]:
    """Returns all results."""
    began = time.monotonic()
    tests, presets = run_tests(), measure_presets()
    modes = {"deterministic": True, "default": False}
    resumes = {name: resumes_bit_for_bit(deterministic) for name, deterministic in modes.items()}
    print("resumes bit for bit:", resumes, flush=True)
    attention = measure_attention(BUDGET_S - (time.monotonic() - began))
    return {
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "platform": backend.get_backend().platform_version,
        "minutes": (time.monotonic() - began) / 60,
        "tests": tests,
        "vocabulary": VOCABULARY,
        "rows": SHAPE.rows,
        "length": SHAPE.source,
        "presets": presets,
        "resumes_bit_for_bit": resumes,
        "attention": attention,
    }


def main() -> None:
    """Measures everything and writes the result file. Exits with status 1 if a check fails."""
    # Programs share the device's memory here.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if (platform := jax.default_backend()) != "gpu":
        sys.exit(f"make gpu: JAX finds no gpu, only {platform}; docs/multi_device.md")
    measured = measure()
    print(results.write("gpu", "make gpu", measured))
    if measured["tests"]["status"] or not measured["resumes_bit_for_bit"]["deterministic"]:
        sys.exit("make gpu: a check has failed")


if __name__ == "__main__":
    main()
