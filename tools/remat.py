"""Measures the memory and the time of a training step with each policy of rematerialization.

    python -m tools.remat

Trains the preset small on 16 sentences of 128 tokens on each side. Writes results/remat.json.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.allocator import restart_with_allocator
from transformer_jax.benchmark import results
from transformer_jax.benchmark.timing import time_in_turns, timer
from transformer_jax.config import SMALL, Config, ExecutionConfig
from transformer_jax.data.buckets import Shape
from transformer_jax.special_ids import EOS
from transformer_jax.training.planning import Planner, compile_training_step
from transformer_jax.types import Batch

POLICIES = ("none", "matmuls", "layers")
SHAPE = Shape(16, 128, 128)
VOCABULARY = 8000
SAMPLES = 5


def measure() -> list[dict[str, Any]]:
    """Returns memory, operations and median milliseconds of a step by policy, timed in turns."""
    draw = np.random.default_rng(0)
    ids = draw.integers(EOS + 1, VOCABULARY, (SHAPE.rows, SHAPE.source)).astype(np.int32)
    batch, key = Batch(ids, np.roll(ids, 1, axis=1), ids), jax.random.key(0)
    rows: list[dict[str, Any]] = []
    runs: dict[str, Any] = {}
    for remat in POLICIES:
        config = Config(model=SMALL, execution=ExecutionConfig(remat=remat))
        planner = Planner(config, (VOCABULARY, VOCABULARY), jax.devices()[:1])
        step = compile_training_step(planner.setup, SHAPE)
        state = jax.jit(planner.setup.init)(key)
        runs[remat] = timer(partial(_step, step, [state], jax.tree.map(jnp.asarray, batch), key))
        analysis = step.memory_analysis()
        rows.append(
            {
                "remat": remat,
                "gflop": planner.flops(SHAPE) / 1e9,
                "temporaries_mib": analysis.temp_size_in_bytes / 2**20,
            }
        )
    times = time_in_turns(runs, SAMPLES)
    return [row | {"step_ms": times[row["remat"]].median * 1e3} for row in rows]


def _step(step: Any, states: list[Any], batch: Batch, key: jax.Array) -> None:
    """Updates the only state in the list, whose memory is reused."""
    states[0], metrics = step(states[0], batch, key)
    jax.block_until_ready(metrics)


def main() -> None:
    """Measures every policy and writes the result file."""
    restart_with_allocator()
    about = {"shape": SHAPE._asdict(), "devices": 1, "samples": SAMPLES}
    print(results.write("remat", "make remat", about | {"rows": measure()}))


if __name__ == "__main__":
    main()
