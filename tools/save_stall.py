"""Measures how much longer training steps take because of a save, and the share of the digests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from configs.quickstart import get_config
from transformer_jax.config import TrainConfig
from transformer_jax.runs import manifest
from transformer_jax.runs.checkpoint import Checkpoints
from transformer_jax.training.trainer import train


def save_stall(folder: Path, turns: int, steps: int) -> dict[str, Any]:
    """Trains the quickstart in turns of `steps` without a save and as many after one. Returns
    medians of steps and means of saves, in milliseconds.

    - step_ms: of a training step without a save.
    - step_stall_ms: that a save adds to the steps after it. Writing ends meanwhile.
    - save_ms, digest_ms: of what a save does in the background, and of the digests in it.
    - digest_share_of_save: their ratio.
    - digest_ms_over_step_stall_ms: the most that digests can add to the stall, as a share of it.
    """
    config, reports = get_config(), list[float]()
    config = replace(
        config,
        data=replace(config.data, dev=(), shapes=1, cache=str(folder / "cache")),
        train=TrainConfig(steps=2 * steps * (turns + 1), save_every=2 * steps, log_every=steps),
    )

    def report(record: dict[str, Any]) -> None:
        if record["kind"] == "train":
            reports.append(time.perf_counter())

    with _timed(manifest, "_measure") as digests, _timed(Checkpoints, "_finish") as saves:
        train(config, folder / "run", reporters=[report])
    # A step is reported before it is saved: a save is in the second half of a turn.
    seconds = np.diff(reports)
    stall = float(np.median(seconds[1::2] - seconds[:-1:2])) * 1e3
    save_ms, digest_ms = sum(saves) / len(saves) * 1e3, sum(digests) / len(saves) * 1e3
    return {
        "turns": turns,
        "steps": steps,
        "step_ms": float(np.median(seconds[::2])) / steps * 1e3,
        "step_stall_ms": stall,
        "save_ms": save_ms,
        "digest_ms": digest_ms,
        "digest_share_of_save": digest_ms / save_ms,
        "digest_ms_over_step_stall_ms": digest_ms / stall if stall > 0 else None,
    }


@contextmanager
def _timed(owner: Any, name: str) -> Iterator[list[float]]:
    """Yields a list of the seconds that each call of a function takes."""
    function, seconds = getattr(owner, name), list[float]()

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            seconds.append(time.perf_counter() - began)

    with patch.object(owner, name, timed):
        yield seconds
