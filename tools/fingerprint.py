"""Prints the SHA-256 of all parameters after 40 steps of two configs: `make fingerprint`.

A change that is meant to keep training as it is prints the same two lines before and after it, on
one machine with the versions of constraints.txt. Other processors round otherwise.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from transformer_jax import Config, load_config_file, train
from transformer_jax.allocator import restart_with_allocator

STEPS = 40


def configs() -> Iterator[tuple[str, Config]]:
    """The quickstart, and the quickstart with packing, subword sampling and accumulation."""
    base = load_config_file("configs/quickstart.py")
    length = replace(base.train, steps=STEPS, evaluate_every=STEPS, save_every=STEPS)
    base = replace(base, train=length, data=replace(base.data, dev=()))
    yield "quickstart", base
    yield (
        "packed, sampled, accumulated",
        replace(
            base,
            tokenizer=replace(base.tokenizer, sampling=0.1),
            data=replace(base.data, packing=True, packed_length=64),
            optimizer=replace(base.optimizer, accumulate=2),
        ),
    )


def fingerprint(config: Config) -> str:
    """SHA-256 of the bytes of the trained parameters, in the order of their paths."""
    with tempfile.TemporaryDirectory() as folder:
        params = train(config, Path(folder) / "run").params()
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        total.update(np.asarray(leaf).tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    restart_with_allocator()
    for name, config in configs():
        print(f"{fingerprint(config)}  {name}", flush=True)
