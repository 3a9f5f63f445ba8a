"""What `make shape` counts."""

import os
import subprocess
import sys

import pytest

from tools.shape import ROOT, code_lines

LIMITS = {"train": (14, 9), "translate": (13, 8)}
"""The greatest numbers of calls and of files on each way."""

TEXT = '''"""A docstring
of two lines."""

import os  # a comment with code

LIMIT = 3
"""A docstring of a constant."""


def f() -> str:
    """A docstring."""
    # a comment
    return """
    text
    """
'''


def test_blanks_comments_and_docstrings_are_no_code() -> None:
    assert code_lines(TEXT) == 6


@pytest.mark.long
def test_the_ways_are_short_and_those_of_the_guide() -> None:
    """On one device, where no kernel is mapped over a mesh."""
    env = os.environ | {"XLA_FLAGS": ""}
    command = [sys.executable, "-m", "tools.shape"]
    output = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    ways = {part.split(":")[0]: part.split()[6:] for part in output.stdout.split("\n\n")[1:]}
    for name, (frames, files) in LIMITS.items():
        assert len(ways[name]) <= frames, ways[name]
        assert len({call.partition(":")[0] for call in ways[name]}) <= files, ways[name]
    guide = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for name in LIMITS:
        assert guide.split(f"<!-- {name} -->\n```\n")[1].split("\n```")[0].split() == ways[name]
