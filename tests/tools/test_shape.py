"""The ways that `make shape` prints are short, and those of the guide."""

import os
import subprocess
import sys

import pytest
from common import ONE_DEVICE

from tools.shape import ROOT

LIMITS = {"train": (14, 9), "model": (9, 6), "translate": (13, 8)}
"""The greatest numbers of calls and of files on each way."""


@pytest.mark.slow
def test_the_ways_are_short() -> None:
    """On one device, where no kernel is mapped over a mesh."""
    command = [sys.executable, "-m", "tools.shape"]
    env = os.environ | ONE_DEVICE
    output = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    ways = {part.split(":")[0]: part.split()[6:] for part in output.stdout.split("\n\n")[1:]}
    guide = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for name, (frames, files) in LIMITS.items():
        assert "\n".join(ways[name]) in guide
        assert len(ways[name]) <= frames, ways[name]
        assert len({call.partition(":")[0] for call in ways[name]}) <= files, ways[name]
    assert ways["train"][-len(ways["model"]) :] == ways["model"]
