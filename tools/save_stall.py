"""Measures how much longer training steps take because of a save, and the share of the digests.

    python -m tools.save_stall

Trains a model of the quickstart's size on one device. Prints JSON.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from configs.quickstart import get_config
from transformer_jax.data.buckets import Shape
from transformer_jax.runs import manifest
from transformer_jax.runs.checkpoint import Checkpoints
from transformer_jax.special_ids import EOS
from transformer_jax.training.planning import Planner, compile_training_step
from transformer_jax.training.resume import checkpoint_trees
from transformer_jax.types import Batch

SHAPE = Shape(96, 24, 24)
STEPS = 12
"""Number of steps in a turn. Writing in the background ends meanwhile."""
TURNS = 9


def measure(turns: int = TURNS, steps: int = STEPS) -> dict[str, Any]:
    """Returns the medians of turns in which nothing, all, and all but digests was done.

    - step_ms: of a training step without a save.
    - step_stall_ms: that a save adds to the steps from the save until it is written.
    - step_stall_without_digests_ms: the same, if digests are not computed.
    - digest_stall_share: share of the stall that digests add; 0 if the turns do not show one.
    - save_ms, digest_ms: of a save and of its digests while nothing else runs.
    - digest_share_of_save: their ratio.
    - digest_ms_over_step_stall_ms: the most that digests can add to the stall, as a share of it.
    """
    train = _trainer()
    times: dict[str, list[float]] = {name: [] for name in ("none", "save", "no digests")}
    alone: list[tuple[float, float]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpoints(Path(folder), keep=1) as checkpoints,
    ):
        numbers = iter(range(1, 3 * turns + 3))

        def save(state: Any) -> None:
            checkpoints.save(next(numbers), checkpoint_trees(state), {})

        train(steps, save)  # the first save and the first steps take longer
        checkpoints.wait()
        for _ in range(turns):
            times["none"].append(train(steps, None))
            times["save"].append(train(steps, save))
            checkpoints.wait()
            with patch.object(manifest, "_measure", _no_digest):
                times["no digests"].append(train(steps, save))
                checkpoints.wait()
            alone.append(_save_alone(lambda: train(0, save), checkpoints))

    def stall(name: str) -> float:
        pairs = zip(times[name], times["none"], strict=True)
        return statistics.median(a - b for a, b in pairs) * 1e3

    added, without = stall("save"), stall("no digests")
    digest_ms = statistics.median(digests for _, digests in alone) * 1e3
    return {
        "turns": turns,
        "steps": steps,
        "step_ms": statistics.median(times["none"]) / steps * 1e3,
        "step_stall_ms": added,
        "step_stall_without_digests_ms": without,
        "digest_stall_share": max(0.0, added / without - 1) if without > 0 else 0.0,
        "save_ms": statistics.median(total for total, _ in alone) * 1e3,
        "digest_ms": digest_ms,
        "digest_share_of_save": statistics.median(digests / total for total, digests in alone),
        "digest_ms_over_step_stall_ms": digest_ms / added if added > 0 else None,
    }


def _trainer() -> Callable[[int, Callable[[Any], None] | None], float]:
    """Returns a function that may save, trains some steps, and returns the seconds it took."""
    config = get_config()
    vocabulary = config.tokenizer.vocabulary
    planner = Planner(config, (vocabulary, vocabulary), jax.devices()[:1])
    draw = np.random.default_rng(0)
    ids = draw.integers(EOS + 1, vocabulary, (SHAPE.rows, SHAPE.source)).astype(np.int32)
    batch, key = Batch(ids, np.roll(ids, 1, axis=1), ids), jax.random.key(0)
    step = compile_training_step(planner.setup, SHAPE)
    state = jax.jit(planner.setup.init)(key)
    batch = jax.tree.map(jnp.asarray, batch)

    def train(steps: int, save: Callable[[Any], None] | None) -> float:
        nonlocal state
        began = time.perf_counter()
        if save:
            save(state)
        for _ in range(steps):
            state, metrics = step(state, batch, key)
            jax.block_until_ready(metrics)
        return time.perf_counter() - began

    return train


def _save_alone(save: Callable[[], Any], checkpoints: Checkpoints) -> tuple[float, float]:
    """Returns the seconds of a save, and of its digests."""
    seconds, digest_of = [], manifest._measure

    def timed(path: Any) -> list[Any]:
        began = time.perf_counter()
        file = digest_of(path)
        seconds.append(time.perf_counter() - began)
        return file

    with patch.object(manifest, "_measure", timed):
        began = time.perf_counter()
        save()
        checkpoints.wait()
        return time.perf_counter() - began, sum(seconds)


def _no_digest(path: Path) -> list[Any]:
    return [path.stat().st_size, "0" * 64]


def main() -> None:
    """Prints what was measured."""
    print(json.dumps(measure(), indent=1))


if __name__ == "__main__":
    main()
