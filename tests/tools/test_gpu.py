"""The program for GPU machines, on a CPU."""

import re

import pytest
from common import tiny

from tools import gpu
from transformer_jax.config import Config, ExecutionConfig
from transformer_jax.data.buckets import Shape


@pytest.mark.long
def test_it_measures_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    deterministic = Config(tiny(), execution=ExecutionConfig(deterministic=True))
    reduced = {"PRESETS": {"tiny": deterministic}, "VOCABULARY": 300, "SHAPE": Shape(8, 8, 8)}
    reduced |= {"STOPPED": "configs/recipes.py", "STEPS": 2}
    reduced["ATTENTION"] = "--lengths 16 --batches 1 --masks full"
    for name, value in reduced.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setenv("XLA_FLAGS", "")  # of the processes that it starts
    found = gpu.measure()
    assert found["device"] == "cpu"
    assert found["tests"]["status"] == 0
    assert re.search(r"[1-9]\d* skipped", found["tests"]["summary"])  # they need a GPU
    assert "passed" not in found["tests"]["summary"]
    assert found["resumes_bit_for_bit"] == {"deterministic": True, "default": True}
    (preset,) = found["presets"].values()
    assert preset["training_step_ms"] > preset["decoding_step_ms"] > 0
    assert preset["decoding_steps"] == 16  # its greatest length
    assert {r["kernel"] for r in found["attention"]["records"]} > {"reference", "xla"}
