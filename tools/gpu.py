"""Checks and measures the project on a GPU, part by part.

    python -m tools.gpu [PART ...]

PART is one of `PARTS`; by default those that results/gpu.json does not hold yet, in this order. It
takes up to four minutes, and is written as soon as it is measured. Comparisons with PyTorch and
transformers are left out where these are not installed. Without a GPU, nothing is written.
"""

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend import backend

from tools.common import CLI
from tools.decode_peers import HuggingFace
from transformer_jax.benchmark import attention, results, training
from transformer_jax.benchmark.pytorch import failure_in
from transformer_jax.benchmark.settings import AttentionBenchmark
from transformer_jax.benchmark.timing import time_in_turns, timer
from transformer_jax.config import BASE, Config, DecodeConfig, ModelConfig
from transformer_jax.data.buckets import ROWS_MULTIPLE, Shape
from transformer_jax.decoding.strategies import Lines, make_search
from transformer_jax.parallel.compile import compile_function
from transformer_jax.parallel.devices import find_accelerator
from transformer_jax.parallel.mesh import make_mesh, replicate
from transformer_jax.runs import checkpoint
from transformer_jax.special_ids import EOS
from transformer_jax.training.planning import Planner, device_memory
from transformer_jax.training.setup import prepare_step

SECONDS = 220.0
"""Seconds after which a part measures nothing more."""
TESTS = ("tests/attention", "tests/models", "tests/training")
TOKENS, WIDTH = 16_384, 2048
"""Tokens of a batch, and the width of all heads, as FlashAttention was measured (Dao 2023)."""
HEAD_SIZES, LENGTHS = (64, 128), (512, 1024, 2048, 4096, 8192, 16_384)
KERNELS = ("cudnn", "xla")
TRAINED = {"base": training.PRESETS["base"], "big": training.PRESETS["big"]}
"""Configs that are trained in bfloat16."""
LENGTH, SHARE, ROWS = 64, 0.8, 4096
"""Length of rows in training, the share of the memory that they fill, and their number at most."""
REMAT = ("none", "layers")
STOPPED, STEPS = "configs/quickstart.py", 40
"""Config and steps of the run that is stopped in the middle."""
DECODED: ModelConfig = replace(BASE, dropout=0.0, dtype="bfloat16")
VOCABULARY = 32_000
SENTENCES, OUTPUT = (64, 256, 1024), 32
"""Sentences of a batch, and the length of each output in decoding."""

Record = dict[str, Any]


def run_tests(end: float) -> Record:
    """Runs the tests marked `gpu`. Returns pytest's status, 124 at the end, and its last line."""
    limit = ["timeout", f"{end - time.monotonic():.0f}"]
    command = [*limit, sys.executable, "-m", "pytest", "-m", "gpu", *TESTS]
    # Set, so that the tests neither ask for a CPU nor compile as on one.
    environment = os.environ | {"JAX_PLATFORMS": "", "XLA_FLAGS": ""}
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    print(ended.stdout, flush=True)
    return {"status": ended.returncode, "summary": ["", *ended.stdout.splitlines()][-1]}


def measure_attention(end: float) -> Record:
    """Returns the kernels and PyTorch's on batches of `TOKENS`, short lengths first."""
    rows: list[Record] = []
    for length, size in itertools.product(LENGTHS, HEAD_SIZES):
        sizes: Any = {"lengths": (length,), "batches": (TOKENS // length,), "head_size": size}
        sizes |= {"heads": WIDTH // size, "dtypes": ("bfloat16",)}
        settings = AttentionBenchmark(kernels=KERNELS, **sizes)
        for case in attention.measure(settings):
            rows += [{"head_size": size} | record for record in case]
            print(*case, sep="\n", flush=True)
            if time.monotonic() > end:
                return {"tokens": TOKENS, "width": WIDTH, "complete": False, "rows": rows}
    return {"tokens": TOKENS, "width": WIDTH, "complete": True, "rows": rows}


def measure_training(end: float) -> Record:
    """Returns the steps of each config with as many rows as fit, and PyTorch's."""
    rows: list[Record] = []
    for (name, config), remat in itertools.product(TRAINED.items(), REMAT):
        if time.monotonic() > end:
            break
        config = config.changed(model={"dtype": "bfloat16"}, execution={"remat": remat})
        planner = Planner(config, (config.tokenizer.vocabulary, config.tokenizer.vocabulary))
        shape = filling(planner)
        record: Record = {"name": name, "remat": remat, "shape": shape._asdict()}
        with failure_in(record):
            record |= training.measure(training.full_rows(config, shape), samples=3)
            rate = planner.flops(shape) / record["step"]["median_s"]
            record["tflops"] = rate / 1e12
            if accelerator := find_accelerator(jax.devices()[0].device_kind):
                record["mfu"] = record["tflops"] / accelerator.tflops
        print(record, flush=True)
        rows.append(record)
    return {"length": LENGTH, "share_of_memory": SHARE, "rows": rows}


def filling(planner: Planner) -> Shape:
    """Returns the shape of the most rows that fill `SHARE` of the memory, as far as it is known."""
    limit = SHARE * device_memory(planner.setup.mesh)
    rows = ROWS_MULTIPLE
    while rows < ROWS and sum(planner.memory(Shape(2 * rows, LENGTH, LENGTH))) <= limit:
        rows *= 2
    return Shape(rows, LENGTH, LENGTH)


def resumes(end: float) -> Record:
    """Returns whether a run that was stopped and continued is one that was never stopped.

    No process finds the programs of another one, so that each compiles and chooses kernels anew.
    """
    names = ("deterministic", "default")
    return {name: _resumes(name == names[0]) for name in names if time.monotonic() < end}


def _resumes(deterministic: bool) -> bool:
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


def measure_decoding(end: float) -> Record:
    """Returns the sentences a second of outputs of a given length, beside Hugging Face's."""
    rows: list[Record] = []
    generate = _hugging_face()
    draw = np.random.default_rng(0)
    for count, beam in itertools.product(SENTENCES, (1, 5)):
        if time.monotonic() > end:
            break
        source = draw.integers(EOS + 1, VOCABULARY, (count, OUTPUT), np.int32)
        calls = {"this": _search(source, beam)}
        record: Record = {"sentences": count, "beam": beam}
        if generate is not None:
            calls["transformers"] = partial(generate, source, beam, OUTPUT)
        with failure_in(record):
            for name, times in time_in_turns({k: timer(v) for k, v in calls.items()}, 3).items():
                record[f"{name}_per_s"] = count / times.median
        print(record, flush=True)
        rows.append(record)
    return {"output": OUTPUT, "vocabulary": VOCABULARY, "rows": rows}


def _search(source: np.ndarray, beam: int) -> Callable[[], Any]:
    """Returns a call of a search with random parameters, whose outputs have a given length."""
    decode = DecodeConfig(beam=beam, min_length=OUTPUT - 1, max_length=OUTPUT)
    mesh = make_mesh(devices=jax.devices()[:1])
    setup = prepare_step(Config(model=DECODED), (VOCABULARY, VOCABULARY), mesh)
    key = replicate(jax.random.key(0), mesh)
    params = compile_function(lambda key: setup.init(key).params, mesh)(key)
    search = compile_function(make_search([setup.model], decode), mesh)
    return lambda: jax.block_until_ready(search([params], Lines(source)))


def _hugging_face() -> Callable[..., Any] | None:
    """Returns `generate` of a MarianMT model of this size; None: it is not installed."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        return None
    device = "cuda" if import_module("torch").cuda.is_available() else "cpu"
    data = {"ids": [], "model": asdict(DECODED), "vocabulary": VOCABULARY}
    return HuggingFace(data, device, DECODED.dtype).generate


PARTS: dict[str, Callable[[float], Record]] = {
    "tests": run_tests,
    "attention": measure_attention,
    "training": measure_training,
    "decoding": measure_decoding,
    "resume": resumes,
}
"""What is measured, by name, the most important first. The argument is the time on the monotonic
clock after which nothing more is measured."""


def measure(names: list[str]) -> Iterator[tuple[str, Record]]:
    """Measures the parts, and yields each with what it was measured with."""
    for name in names:
        began = time.monotonic()
        values = PARTS[name](began + SECONDS)
        about = {"device": jax.devices()[0].device_kind, "devices": jax.device_count()}
        about |= {"platform": backend.get_backend().platform_version}
        yield name, results.origin() | about | {"minutes": (time.monotonic() - began) / 60} | values


def main(names: list[str]) -> None:
    """Measures the parts that are named. Exits with status 1 if a check fails."""
    # Programs share the device's memory here.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if unknown := set(names) - PARTS.keys():
        sys.exit(f"PART={' '.join(sorted(unknown))}: must be one of {', '.join(PARTS)}")
    if (platform := jax.default_backend()) != "gpu":
        sys.exit(f"make gpu: JAX finds no gpu, only {platform}; docs/multi_device.md")
    parts: dict[str, Record] = {}
    with suppress(FileNotFoundError):
        parts = results.read("gpu")["parts"]
    for name, values in measure(names or [name for name in PARTS if name not in parts]):
        parts[name] = values
        print(results.write("gpu", "make gpu", {"parts": parts}))
    tests, resume = parts.get("tests", {}), parts.get("resume", {})
    if tests.get("status") or not resume.get("deterministic", True):
        sys.exit("make gpu: a check has failed")


if __name__ == "__main__":
    main(sys.argv[1:])
