"""Prints the SHA-256 of all parameters after 40 steps of two configs: `make fingerprint`.

A change that is meant to keep training as it is prints the same two lines before and after it, on
one machine with the versions of constraints.txt. Other processors round otherwise.
"""

import hashlib
import tempfile
from pathlib import Path

import jax
import numpy as np

from tools.study import changed
from transformer_jax import Config, load_config_file, train
from transformer_jax.allocator import restart_with_allocator

SHORT = {
    **dict.fromkeys(("train.steps", "train.evaluate_every", "train.save_every"), 40),
    "data.dev": [],
}
CHANGES = {
    "quickstart": {},
    "packed, sampled, accumulated": {
        "tokenizer.sampling": 0.1,
        "data.packing": True,
        "data.packed_length": 64,
        "optimizer.accumulate": 2,
    },
}
"""Changes of the quickstart's config."""


def fingerprint(config: Config) -> str:
    """Returns the SHA-256 of the bytes of the trained parameters, in the order of their paths."""
    with tempfile.TemporaryDirectory() as folder:
        params = train(config, Path(folder) / "run").params()
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        total.update(np.asarray(leaf).tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    restart_with_allocator()
    quickstart = load_config_file("configs/quickstart.py")
    for name, changes in CHANGES.items():
        print(f"{fingerprint(changed(quickstart, SHORT | changes))}  {name}", flush=True)
