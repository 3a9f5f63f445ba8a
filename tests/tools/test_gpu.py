"""The program for GPU machines, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import gpu
from transformer_jax.benchmark import results

ROOT = Path(__file__).parents[2]


def test_without_a_gpu_it_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with pytest.raises(SystemExit) as stop:
        gpu.main([f"--folder={tmp_path}"])
    assert stop.value.code == "make gpu: JAX finds no gpu, only cpu; docs/multi_device.md"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_it_measures_what_it_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.gpu", "--platform=cpu", "--quick"]
    environment = os.environ | {"XLA_FLAGS": ""}
    subprocess.run([*command, f"--folder={tmp_path}"], cwd=ROOT, env=environment, check=True)
    found = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    assert tuple(found)[: len(results.HEADER)] == results.HEADER
    assert found["device"] == "cpu"
    assert found["tests"]["skipped"] == found["tests"]["tests"] > 0  # they need a GPU
    assert found["resumes_bit_for_bit"] == {"deterministic": True, "default": True}
    (preset,) = found["presets"].values()
    assert preset["training_step_ms"] > preset["decoding_step_ms"] > 0
    assert preset["decoding_steps"] == 2 * found["length"] + 10
    assert found["attention"]["cases_left_out"] == 0
    assert {r["kernel"] for r in found["attention"]["records"]} > {"reference", "xla"}
