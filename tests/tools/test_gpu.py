"""The program for GPU machines, on a CPU."""

import re

import jax
import pytest
from common import ONE_DEVICE, tiny

from tools import gpu
from transformer_jax.benchmark import training
from transformer_jax.config import Config, TokenizerConfig


@pytest.mark.slow
def test_it_measures_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(tiny(max_length=32), tokenizer=TokenizerConfig(vocabulary=320))
    reduced = {"TRAINED": {"tiny": config}, "ROWS": 8, "LENGTH": 8, "REMAT": ("none",)}
    reduced |= {"STOPPED": "configs/recipes.py", "STEPS": 2, "TOKENS": 32, "WIDTH": 16}
    reduced |= {"HEAD_SIZES": (8,), "LENGTHS": (16,), "KERNELS": ("xla",)}
    reduced |= {"DECODED": config.model, "VOCABULARY": 320, "SENTENCES": (8,), "OUTPUT": 6}
    for name, value in reduced.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(training, "_start_peers", lambda *_: {})  # other tests start them
    assert jax.device_count() == 8  # JAX starts here, if no other test has started it
    for name, value in ONE_DEVICE.items():  # of the processes that it starts
        monkeypatch.setenv(name, value)
    found = dict(gpu.measure(list(gpu.PARTS)))
    assert {part["device"] for part in found.values()} == {"cpu"}
    assert found["tests"]["status"] == 0
    assert re.search(r"[1-9]\d* skipped", found["tests"]["summary"])  # they need a GPU
    assert "passed" not in found["tests"]["summary"]
    assert {row["kernel"] for row in found["attention"]["rows"]} >= {"xla"}
    assert found["attention"]["complete"]
    (trained,) = found["training"]["rows"]
    assert trained["tflops"] > 0
    decoded = {row["beam"]: row["this_per_s"] for row in found["decoding"]["rows"]}
    assert decoded.keys() == {1, 5} and min(decoded.values()) > 0
    assert found["resume"]["deterministic"] and found["resume"]["default"]


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(SystemExit, match="PART=nothing: must be one of tests, attention, train"):
        gpu.main(["nothing"])
    with pytest.raises(SystemExit, match=r"JAX finds no gpu, only cpu"):
        gpu.main([])
