"""Trains a model: python train.py --config=configs/quickstart.py --run=runs/quickstart

For a training loop of your own, see docs/own_loop.md.
"""

import sys

from transformer_jax.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
