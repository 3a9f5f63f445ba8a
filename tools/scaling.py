"""Compiles training steps for TPU slices ahead of time, and counts what their chips exchange.

    python -m tools.scaling

Needs no TPU, but its compiler (the extra `tpu`). Each chip has the same number of tokens. Programs
that are compiled are kept in runs/scaling as counts, so that the command can be interrupted. Writes
results/scaling.json and results/scaling.svg.
"""

import itertools
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tools.collectives import collectives
from transformer_jax import plot
from transformer_jax.benchmark import results
from transformer_jax.config import BASE, BIG, Config, MeshConfig
from transformer_jax.data.buckets import Shape
from transformer_jax.files import write_whole
from transformer_jax.parallel.devices import ACCELERATORS
from transformer_jax.parallel.mesh import topology_devices
from transformer_jax.training.planning import Planner, compile_gradients, temporary_bytes

CHIP = "TPU v5 lite"
SLICES = {8: "v5e:2x4", 64: "v5e:8x8", 256: "v5e:16x16"}
MODELS = {"base": BASE, "big": BIG}
MESHES = {
    "data": lambda chips: MeshConfig(),
    "fsdp": lambda chips: MeshConfig(fsdp=chips),
    "fsdp x tensor": lambda chips: MeshConfig(fsdp=chips // 4, tensor=4),
}
VOCABULARY = 37_000  # as in configs/base.py
ROWS, LENGTH = 64, 64  # sentences of a chip, and their tokens on each side
LINK_GBYTES = 200
"""Bandwidth between the chips of a slice: 1,600 Gbit/s for a chip (Google's data sheet of v5e)."""
FOLDER = Path("runs/scaling")


def measure(model: str, chips: int, mesh: str) -> dict[str, Any]:
    """Returns the memory, the operations and the collectives of a step on a slice."""
    config = Config(model=replace(MODELS[model], dtype="bfloat16"), mesh=MESHES[mesh](chips))
    config = replace(config, execution=replace(config.execution, kernel="xla"))
    devices = topology_devices(SLICES[chips])
    planner = Planner(config, (VOCABULARY, VOCABULARY), devices)
    shape = Shape(ROWS * chips, LENGTH, LENGTH)
    memory, began = planner.memory(shape), time.monotonic()
    compiled = compile_gradients(planner.setup, shape)
    found = collectives(compiled)
    return {
        "model": model,
        "chips": chips,
        "mesh": mesh,
        "rows": shape.rows,
        "tflop": planner.flops(shape) / 1e12,
        "params_mib": memory.params / 2**20,
        "rest_of_state_mib": memory.rest / 2**20,
        "temporaries_mib": temporary_bytes(compiled) / 2**20,
        "compile_s": time.monotonic() - began,
        "collectives": {kind: asdict(each) for kind, each in found.items()},
    }


def estimate(row: dict[str, Any]) -> dict[str, float]:
    """Returns milliseconds of a step by arithmetic alone: matmuls at the chip's peak, and bytes
    over the bandwidth of its links. In a ring, an all-reduce passes each byte twice."""
    found = row["collectives"].items()
    passed = sum(each["bytes"] * (1 + (kind == "all-reduce")) for kind, each in found)
    matmuls = row["tflop"] / row["chips"] / ACCELERATORS[CHIP].tflops
    return {"matmuls_ms": matmuls * 1e3, "exchange_ms": passed / LINK_GBYTES / 1e9 * 1e3}


def curves(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the bytes that collectives handle in a step by chips, as `plot.lines` takes them."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        total = sum(each["bytes"] for each in row["collectives"].values()) / 2**20
        lines = panels.setdefault(f"{row['model']}: MiB exchanged in a step", {})
        lines.setdefault(row["mesh"], []).append((row["chips"], total))
    return {"panels": panels, "x": "chips", "xscale": "log", "yscale": "log"}


def measured(model: str, chips: int, mesh: str) -> dict[str, Any]:
    """Returns `measure`, which is kept in runs/scaling."""
    path = FOLDER / f"{model}_{chips}_{mesh.replace(' ', '')}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        row = measure(model, chips, mesh)
        write_whole(path, json.dumps(row))
        print(f"{model}, {chips} chips, {mesh}: {row['compile_s']:.0f} s", flush=True)
    return json.loads(path.read_text("utf-8"))


def main() -> None:
    """Measures every model, slice and mesh that is not in runs/scaling, and writes the results."""
    programs = itertools.product(SLICES, MODELS, MESHES)
    rows = [measured(model, chips, mesh) for chips, model, mesh in programs]
    rows = [row | estimate(row) for row in rows]
    about = {"chip": CHIP, "link_gbytes_per_s": LINK_GBYTES, "length": LENGTH}
    about |= {"tokens_per_chip": 2 * ROWS * LENGTH, "vocabulary": VOCABULARY}
    drawn = {"curves": curves(rows), "rows": rows}
    print(results.write("scaling", "make measure NAME=scaling", about | drawn))
    plot.save(plot.lines(**drawn["curves"]), results.FOLDER / "scaling.svg")


if __name__ == "__main__":
    main()
