"""Checks that a run is the same run on any devices, and writes results/devices.json.

    python -m tools.devices

Compares losses and gradients on meshes of eight emulated host devices; continues a run, saved on
eight devices, on other numbers of devices and processes, and compares the pairs that they train on
and their losses; and kills one of two processes. Takes ten minutes on two cores.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from tools.common import config_file, gradient_errors
from transformer_jax.benchmark import results
from transformer_jax.cli.main import main as command_line
from transformer_jax.config import (
    Config,
    DataConfig,
    ExecutionConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
    to_json,
)
from transformer_jax.parallel.compile import compile_step
from transformer_jax.parallel.mesh import make_mesh, shard_batch
from transformer_jax.parallel.parameters import shard_tree
from transformer_jax.special_ids import EOS, PAD
from transformer_jax.training import trainer
from transformer_jax.training.reporters import read_metrics
from transformer_jax.training.setup import StepSetup, prepare_step
from transformer_jax.training.step import gradients
from transformer_jax.types import Batch

FOLDER = Path("runs/devices")
DEVICES, SAVED, STEPS = 8, 20, 40
"""Devices of the first run, the step at which it is continued on others, and its last step."""

LIMIT = 1e-5
"""The largest relative error of losses and gradients."""

MESHES: dict[str, tuple[MeshConfig, Literal["jit", "pmap"], int]] = {
    "data 8": (MeshConfig(data=8), "jit", 1),
    "fsdp 8": (MeshConfig(data=1, fsdp=8), "jit", 1),
    "data 2 x fsdp 2 x tensor 2": (MeshConfig(data=2, fsdp=2, tensor=2), "jit", 1),
    "pmap 8": (MeshConfig(data=8), "pmap", 1),
    "1 device, 4 microbatches": (MeshConfig(data=1), "jit", 4),
}
"""Meshes with their executors, and numbers of microbatches."""

CHANGES = {
    "1 device": (1, 1, []),
    "2 devices": (2, 1, []),
    "4 devices, fsdp 2 x tensor 2": (4, 1, ["--config.mesh.fsdp=2", "--config.mesh.tensor=2"]),
    "8 devices": (8, 1, []),
    "8 devices, fsdp 8": (8, 1, ["--config.mesh.fsdp=8"]),
    "2 processes of 2 devices": (2, 2, []),
    "2 processes of 4 devices, fsdp 8": (4, 2, ["--config.mesh.fsdp=8"]),
}
"""Devices of a process, processes, and options with which the run is continued."""


def make_config(folder: Path) -> Config:
    """Returns a small config with dropout, on pairs of words in reverse that differ in sources.

    At larger learning rates, steps amplify the rounding of sums in another order: at 0.003, reached
    after 20 steps, losses differ by up to 5e-4 after another 20. With ReLU, a hidden unit that is 0
    but for rounding may be on in one program and off in another, and gradients differ by more.
    """
    draw, words = random.Random(0), ["red", "green", "blue", "small", "old", "new", "big", "hot"]
    sources = sorted({" ".join(draw.choices(words, k=draw.randint(2, 9))) for _ in range(3000)})
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{source}\t{' '.join(reversed(source.split()))}\n" for source in sources]
    (folder / "pairs.tsv").write_text("".join(lines), "utf-8")
    return Config(
        model=ModelConfig(
            layers=2, d_model=128, heads=4, d_ff=256, max_length=64, activation="gelu"
        ),
        tokenizer=TokenizerConfig(vocabulary=320),
        data=DataConfig(train=(str(folder / "pairs.tsv"),), dev=(), batch_tokens=1024, shapes=2),
        optimizer=OptimizerConfig(schedule="inverse_sqrt", learning_rate=0.001, warmup=100),
        train=TrainConfig(steps=STEPS, save_every=SAVED, log_every=1, evaluate_every=1000),
    )


def compare_meshes(config: Config) -> dict[str, Any]:
    """Returns how far losses and gradients on meshes are from those on one device, without dropout,
    before the first step and after warm-up."""
    model = replace(config.model, dropout=0.0)
    config = replace(config, model=model, mesh=MeshConfig(data=1))
    one = make_mesh(config.mesh, jax.devices()[:1])
    alone = prepare_step(config, (320, 320), one)
    batch, *batches = _batches(1 + config.optimizer.warmup)
    key = jax.random.key(0)
    first = jax.jit(alone.init)(key)
    update, trained = jax.jit(alone.update), first
    for other in batches:
        trained, _ = update(trained, other, key)
    found: dict[str, Any] = {}
    for when, state in {"first step": first, "after warm-up": trained}.items():
        params = jax.tree.map(np.asarray, state.params)
        wanted, loss = _gradient(alone, one, params, batch)
        for name, (mesh, executor, accumulate) in MESHES.items():
            changed = replace(
                config,
                mesh=mesh,
                execution=ExecutionConfig(executor=executor),
                optimizer=replace(config.optimizer, accumulate=accumulate),
            )
            used = make_mesh(mesh, jax.devices()[: mesh.data * mesh.fsdp * mesh.tensor])
            setup = prepare_step(changed, (320, 320), used)
            gradient, other = _gradient(setup, used, params, batch)
            found.setdefault(name, {})[when] = {
                "loss": abs(other / loss - 1),
                "gradient": max(jax.tree.leaves(gradient_errors(gradient, wanted))),
            }
    return found


def _batches(count: int) -> Iterator[Batch]:
    """Yields batches of 32 random sentences of 24 words, which are their own translations."""
    draw = np.random.default_rng(0)
    for _ in range(count):
        source = draw.integers(EOS + 1, 320, (32, 24)).astype(np.int32)
        yield Batch(source, np.roll(source, 1, axis=1), source)


def _gradient(setup: StepSetup, mesh: Mesh, params: Any, batch: Batch) -> tuple[Any, float]:
    """Returns the gradient of the summed loss, and the sum."""

    def step(params: Any, batch: Batch, key: Any, reduce: Any = lambda tree: tree) -> Any:
        options = {"loss": setup.loss, "accumulate": setup.microbatches}
        return reduce(gradients(params, batch, key, {}, **options)[:2])

    run = compile_step(step, mesh, params, executor=setup.config.execution.executor)
    gradient, total = run(shard_tree(params, mesh), shard_batch(batch, mesh), jax.random.key(1))
    return jax.tree.map(np.asarray, gradient), float(total)


def record(path: Path, arguments: Sequence[str]) -> None:
    """Runs a command, and writes the source ids of all rows that it gives its devices to `path`."""
    place = trainer.shard_batch
    with path.open("w", encoding="utf-8") as file:

        def recorded(batch: Batch, mesh: Any) -> Any:
            file.write(json.dumps(sources(batch)) + "\n")
            return place(batch, mesh)

        trainer.shard_batch = recorded
        command_line(list(arguments))


def sources(batch: Batch) -> list[list[int]]:
    """Returns the source ids of the rows that are not empty."""
    rows = [row[row != PAD].tolist() for row in np.asarray(batch.source)]
    return [row for row in rows if row]


def train(
    config: Config, run: Path, devices: int, processes: int, options: Sequence[str]
) -> list[Counter[tuple[int, ...]]]:
    """Trains in processes of their own. Returns the sources of each step, over all processes."""
    path = config_file(config, run.parent / f"{run.name}.py")
    records = [run.parent / f"{run.name}.{i}.jsonl" for i in range(processes)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for i, file in enumerate(records):
        join = [f"--coordinator=127.0.0.1:{port}", f"--process={i}/{processes}"]
        command = [sys.executable, "-m", "tools.devices", str(file), "train", f"--config={path}"]
        command += [f"--run={run}", *options, *(join if processes > 1 else [])]
        started.append(subprocess.Popen(command, env=environment(devices), stderr=subprocess.PIPE))
    for process in started:
        _, error = process.communicate(timeout=600)
        if process.returncode:
            raise RuntimeError(error.decode())
    steps = zip(*(file.read_text("utf-8").splitlines() for file in records), strict=True)
    return [Counter(tuple(row) for part in step for row in json.loads(part)) for step in steps]


def environment(devices: int) -> dict[str, str]:
    """Returns the environment of a process with this number of devices."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def losses(run: Path) -> dict[int, float]:
    """Returns the training loss of each step of a run."""
    records = read_metrics(run / "metrics.jsonl")
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


def loss_error(actual: dict[int, float], wanted: dict[int, float], first: int) -> float:
    """Returns the largest relative error of the losses of steps from `first` on."""
    return max(abs(actual[step] / wanted[step] - 1) for step in range(first, STEPS + 1))


def compare_changes(
    config: Config, folder: Path, names: Sequence[str] = tuple(CHANGES)
) -> dict[str, Any]:
    """Returns how a run goes on with other devices and processes, by what has changed.

    `loss` is the largest relative error over the steps after the change.
    """
    whole, saved = folder / "whole", folder / "saved"
    consumed = train(config, whole, DEVICES, 1, [])
    shorter = replace(config, train=replace(config.train, steps=SAVED))
    before = train(shorter, saved, DEVICES, 1, [])
    wanted, found = losses(whole), {}
    for name in names:
        devices, processes, options = CHANGES[name]
        continued = folder / name.replace(" ", "_").replace(",", "")
        shutil.copytree(saved, continued)
        after = train(config, continued, devices, processes, options)
        found[name] = {
            "steps": len(after),
            "pairs": sum(map(Counter.total, after)),
            "same_pairs": before + after == consumed,
            "loss": loss_error(losses(continued), wanted, SAVED + 1),
        }
    return found


def kill_a_process(config: Config, folder: Path) -> dict[str, Any]:
    """Kills one of two processes. Returns how they end, and how the run goes on afterwards.

    folder: holds the run `whole` of `compare_changes`.
    """
    run, path = folder / "killed", folder / "whole.py"
    command = [sys.executable, "-m", "transformer_jax.cli.main", "train", "--processes=2"]
    command += [f"--config={path}", f"--run={run}", "--config.train.steps=100000"]
    launcher = subprocess.Popen(command, env=environment(2), stderr=subprocess.PIPE)
    while not (run / f"checkpoints/{SAVED:08}").exists() and launcher.poll() is None:
        time.sleep(0.1)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    began = time.monotonic()
    _, error = launcher.communicate(timeout=120)
    seconds = time.monotonic() - began
    train(config, run, 2, 2, [])
    wanted, other = losses(folder / "whole"), losses(run)
    return {
        "seconds": seconds,
        "status": launcher.returncode,
        "message": error.decode().splitlines()[-1],
        "loss": loss_error(other, wanted, 1),
    }


def main() -> None:
    """Makes all comparisons and writes the result file."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    config = make_config(FOLDER)
    found = {"meshes": compare_meshes(config), "changes": compare_changes(config, FOLDER)}
    about = {"model": to_json(config)["model"], "saved_at": SAVED, "steps": STEPS}
    found["death of a process"] = kill_a_process(config, FOLDER)
    print(results.write("devices", "make devices", about | found))
    if wrong := list(_wrong(found)):
        sys.exit(f"above {LIMIT} or other pairs: {', '.join(wrong)}")


def _wrong(found: dict[str, Any]) -> Iterator[str]:
    """Yields the names of the comparisons whose sides are not the same within `LIMIT`."""
    for name, errors in found["meshes"].items():
        if any(error > LIMIT for when in errors.values() for error in when.values()):
            yield name
    for name, change in found["changes"].items():
        if not change["same_pairs"] or change["loss"] > LIMIT:
            yield name
    if found["death of a process"]["loss"] > LIMIT:
        yield "death of a process"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        record(Path(sys.argv[1]), sys.argv[2:])
    else:
        main()
