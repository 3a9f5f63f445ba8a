"""Tests marked `optimized` also pass as users' programs are compiled: with XLA's own flags."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.slow
def test_marked_tests_pass_as_users_compile() -> None:
    """Kernels' tolerances, a step of training, resuming and decoding."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    files = [p for p in TESTS.glob("*/test_*.py") if "mark.optimized" in p.read_text("utf-8")]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "optimized and not long and not slow", *files],
        env=os.environ | flags,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
