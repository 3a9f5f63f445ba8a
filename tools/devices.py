"""Checks that a run is the same run on any devices.

    python -m tools.devices

Writes results/devices.json. Compares losses and gradients on meshes of eight emulated host devices;
continues a run, saved on eight devices, on other numbers of devices and processes, and compares the
pairs that they train on and their losses; and compares what the run translates on them. Takes ten
minutes on two cores.
"""

import itertools
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs.quickstart import get_config
from tools.common import config_file, run_command
from tools.processes import Fault, finish, start
from transformer_jax.benchmark import results
from transformer_jax.config import Config, ExecutionConfig, MeshConfig, OptimizerConfig, to_json
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.special_ids import EOS
from transformer_jax.text.corpus import Corpus
from transformer_jax.training.oracles import gradient, gradient_errors
from transformer_jax.training.reporters import read_metrics
from transformer_jax.training.setup import prepare_step
from transformer_jax.types import Batch

FOLDER = Path("runs/devices")
DEVICES, SAVED, STEPS = 8, 20, 40
"""Devices of the first run, the step at which it is continued on others, and its last step."""

VOCABULARY = 320
LIMIT = 1e-5
"""The largest relative error of losses and gradients."""

OPTIMIZER = OptimizerConfig(schedule="inverse_sqrt", learning_rate=0.001, warmup=100)
"""At larger learning rates, steps amplify the rounding of sums in another order: at 0.003, reached
after 20 steps, losses differ by up to 5e-4 after another 20."""

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "data 8": (8, {"mesh": MeshConfig(data=8)}),
    "fsdp 8": (8, {"mesh": MeshConfig(fsdp=8)}),
    "data 2 x fsdp 2 x tensor 2": (8, {"mesh": MeshConfig(data=2, fsdp=2, tensor=2)}),
    "pmap 8": (8, {"mesh": MeshConfig(), "execution": ExecutionConfig(executor="pmap")}),
    "1 device, 4 microbatches": (1, {"optimizer": replace(OPTIMIZER, accumulate=4)}),
}
"""Numbers of devices, and changes of the config of one device."""

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

TRANSLATIONS = {
    "1 device": (1, []),
    "2 devices": (2, []),
    "4 devices": (4, []),
    "8 devices": (8, []),
    "2 devices, tensor 2": (2, ["--mesh", "tensor=2"]),
    "2 processes of 2 devices": (2, ["--processes=2"]),
}
"""Devices of a process, and options with which lines are translated."""

LINES = 1000
"""Lines to translate."""


def make_config() -> Config:
    """Returns a small config with dropout.

    With ReLU, a hidden unit that is 0 but for rounding may be on in one program and off in another,
    and gradients differ by more.
    """
    config = get_config().changed(
        model={"norm": "post", "activation": "gelu"},
        tokenizer={"vocabulary": VOCABULARY},
        data={"dev": (), "batch_tokens": 1024, "shapes": 2},
        train={"steps": STEPS, "save_every": SAVED, "log_every": 1, "evaluate_every": 1000},
    )
    return replace(config, optimizer=OPTIMIZER)


def compare_meshes(config: Config) -> dict[str, Any]:
    """Returns how far losses and gradients on meshes are from those on one device, without dropout,
    before the first step and after warm-up."""
    config = config.changed(model={"dropout": 0.0}, mesh={"data": 1})
    one = make_mesh(config.mesh, jax.devices()[:1])
    alone = prepare_step(config, (VOCABULARY, VOCABULARY), one)
    batch, *batches = _batches(1 + config.optimizer.warmup)
    key = jax.random.key(0)
    first = trained = jax.jit(alone.init)(key)
    update = jax.jit(alone.update)
    for other in batches:
        trained, _ = update(trained, other, key)
    meshes: dict[str, Any] = {name: {} for name in MESHES}
    for when, state in {"first step": first, "after warm-up": trained}.items():
        params = jax.tree.map(np.asarray, state.params)
        wanted, loss = gradient(alone, params, batch)
        for name, (devices, changes) in MESHES.items():
            changed = replace(config, **changes)
            mesh = make_mesh(changed.mesh, jax.devices()[:devices])
            setup = prepare_step(changed, (VOCABULARY, VOCABULARY), mesh)
            computed, other = gradient(setup, params, batch)
            error = max(jax.tree.leaves(gradient_errors(computed, wanted)))
            meshes[name][when] = {"loss": abs(other / loss - 1), "gradient": error}
    return meshes


def _batches(count: int) -> Iterator[Batch]:
    """Yields batches of 32 random sentences of 24 words, which are their own translations."""
    draw = np.random.default_rng(0)
    for _ in range(count):
        source = draw.integers(EOS + 1, VOCABULARY, (32, 24), np.int32)
        yield Batch(source, np.roll(source, 1, axis=1), source)


def train(
    config: Config, run: Path, devices: int, processes: int, options: Sequence[str]
) -> list[Counter[tuple[int, ...]]]:
    """Trains in processes of their own. Returns the sources of each step, over all processes."""
    path, record = config_file(config, run.with_suffix(".py")), run.with_suffix(".rows")
    arguments = ["train", f"--config={path}", f"--run={run}", *options]
    arguments += [f"--processes={processes}"] if processes > 1 else []
    training = start(*arguments, fault=Fault(record=str(record)), environment=emulated(devices))
    status, error = finish(training)
    if status:
        raise RuntimeError(error)
    files = [Path(f"{record}.{process}") for process in range(processes)]
    steps = zip(*(file.read_text("utf-8").splitlines() for file in files), strict=True)
    return [Counter(tuple(row) for part in step for row in json.loads(part)) for step in steps]


def emulated(devices: int) -> dict[str, str]:
    """Returns the changes of the environment that give a process this number of devices."""
    flag = f"--xla_force_host_platform_device_count={devices}"
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}


def losses(run: Path) -> np.ndarray:
    """Returns the training losses of the steps after `SAVED`."""
    records = read_metrics(run / "metrics.jsonl")
    return np.array([r["loss"] for r in records if r["kind"] == "train" and r["step"] > SAVED])


def compare_changes(config: Config, folder: Path) -> dict[str, Any]:
    """Returns how a run goes on with other devices and processes, by what has changed.

    `loss` is the largest relative error over the steps after the change.
    """
    whole, saved = folder / "whole", folder / "saved"
    consumed = train(config, whole, DEVICES, 1, [])
    shorter = replace(config, train=replace(config.train, steps=SAVED))
    before = train(shorter, saved, DEVICES, 1, [])
    changes = {}
    for number, (name, change) in enumerate(CHANGES.items()):
        continued = Path(shutil.copytree(saved, folder / f"continued_{number}"))
        after = train(config, continued, *change)
        changes[name] = {
            "steps": len(after),
            "pairs": sum(map(Counter.total, after)),
            "same_pairs": before + after == consumed,
            "loss": float(np.max(np.abs(losses(continued) / losses(whole) - 1))),
        }
    return changes


def compare_translations(run: Path, lines: Path) -> dict[str, Any]:
    """Returns how many lines are translated as on one device, and the seconds of the command, whose
    programs an earlier call has compiled."""
    sources = [source for source, _ in itertools.islice(Corpus("grammar").pairs(), LINES)]
    lines.write_text("".join(f"{source}\n" for source in sources), "utf-8")
    rows: dict[str, Any] = {}
    outputs: dict[str, list[str]] = {}
    for name, (devices, options) in TRANSLATIONS.items():
        command = ("translate", "--beam=5", f"--run={run}", f"--input={lines}", *options)
        _, (shown, seconds) = (run_command(*command, **emulated(devices)) for _ in range(2))
        outputs[name] = shown.splitlines()
        same = sum(map(str.__eq__, outputs[name], outputs["1 device"]))
        rows[name] = {"lines": LINES, "seconds": seconds, "same": same}
    return rows


def main() -> None:
    """Makes all comparisons and writes the result file."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    os.environ.update(emulated(DEVICES))
    jax.config.update("jax_platforms", "cpu")
    FOLDER.mkdir(parents=True)
    config = make_config()
    meshes, changes = compare_meshes(config), compare_changes(config, FOLDER)
    errors = [e for at in meshes.values() for each in at.values() for e in each.values()]
    errors += [change["loss"] for change in changes.values()]
    if max(errors) > LIMIT or not all(change["same_pairs"] for change in changes.values()):
        sys.exit(f"above {LIMIT}, or other pairs: {meshes}, {changes}")
    translations = compare_translations(FOLDER / "whole", FOLDER / "lines.txt")
    measured = {"config": to_json(config), "meshes": meshes, "changes": changes}
    measured |= {"translations": translations}
    print(results.write("devices", "make measure NAME=devices", measured))


if __name__ == "__main__":
    main()
