"""PyTorch's attention is timed in processes of its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transformer_jax.benchmark import attention, pytorch, timing
from transformer_jax.benchmark.attention import Case, draw_inputs
from transformer_jax.benchmark.exact import exact


def fake(seconds: float) -> pytorch.Worker:
    """A worker without a process, with fixed times and correct results."""
    outputs: list[np.ndarray] = []

    def ask(method: str, *arguments: Any) -> Any:
        if method == "load":
            outputs[:] = [exact(arguments[0]).arrays[0].reshape(arguments[0][0].shape)]
            return {"version": "1", "threads": 2}
        return {"time": seconds, "run": outputs, "unload": None}[method]

    return ask


def test_the_faster_allocator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_SAMPLES", 3)
    case = Case("float32", 1, "full", 4, "forward", heads=2, kv_heads=2, head_size=4)
    workers = {"default": fake(2.0), "tuned": fake(1.0)}
    monkeypatch.setattr(timing, "seconds_per_call", lambda call, count: 4.0)
    kernel, torch = attention.measure_case(case, ("reference",), workers)
    assert torch["kernel"] == "torch"
    assert torch["allocator"] == "tuned"
    assert torch["median_s_by_allocator"] == {"default": 2.0, "tuned": 1.0}
    assert (torch["version"], torch["threads"]) == ("1", 2)
    assert torch["ratio_to_torch"] == 1
    assert kernel["ratio_to_torch"] == 0.25
    assert kernel["ratio_to_torch_spread"] == [0.25, 0.25]
    assert torch["error"] < 2e-6


TORCH = """
import numpy

__version__ = "fake"

def get_num_threads():
    return 3

def from_numpy(array):
    print("libraries may print")
    return Tensor(array)

float32 = "float32"

from contextlib import nullcontext as set_grad_enabled

class Tensor:
    def __init__(self, array): self.array, self.shape = array, array.shape
    def to(self, device, dtype): return self
    detach = requires_grad_ = float = cpu = lambda self: self
    def numpy(self): return self.array
    def backward(self, gradient): Tensor.grad = gradient

class nn:
    class functional:
        def scaled_dot_product_attention(query, key, value, is_causal, enable_gqa):
            if numpy.isnan(query.array).any():
                raise RuntimeError("no number")
            if numpy.isinf(query.array).any():
                import os
                os._exit(7)
            return Tensor(value.array + is_causal)
"""


@pytest.fixture
def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `torch` whose attention returns the values, plus 1 with a causal mask.

    All gradients are that of the output."""
    (tmp_path / "torch.py").write_text(TORCH, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))  # which a worker inherits


@pytest.mark.usefixtures("fake_torch")
def test_a_process_answers_until_it_ends() -> None:
    arrays = [np.full((1, 2, 3, 1), i, np.float32) for i in range(4)]
    with pytorch.worker({}, pytorch.Attention) as ask:
        about = ask("load", arrays, "cpu", "float32", "causal", "forward")
        assert about == {"version": "fake", "threads": 3}
        (output,) = ask("run")
        np.testing.assert_array_equal(output, arrays[2] + 1)
        assert ask("time", 2) > 0
        ask("load", arrays, "cpu", "float32", "full", "both")
        for result, expected in zip(ask("run"), (2, 3, 3, 3), strict=True):
            np.testing.assert_array_equal(result, arrays[expected])
        ask("load", [arrays[0] * np.nan, *arrays[1:]], "cpu", "float32", "full", "forward")
        with pytest.raises(RuntimeError, match="no number"):
            ask("run")
        with pytest.raises(RuntimeError, match="has no attribute 'float64'"):
            ask("load", arrays, "cpu", "float64", "full", "forward")
        ask("unload")
        assert ask("run") == []  # a worker that has failed goes on
        ask("load", [arrays[1] * np.inf, *arrays[1:]], "cpu", "float32", "full", "forward")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="terminated abruptly"):
                ask("run")


@pytest.mark.usefixtures("fake_torch")
def test_a_worker_that_fails_is_reported() -> None:
    case = Case("bfloat16", 1, "full", 4, "forward", heads=1, kv_heads=1, head_size=4)
    with pytorch.worker({}, pytorch.Attention) as ask:
        failed, kernel = attention.measure_case(case, ("reference",), {"default": ask})
    assert failed["allocator"] == "default"
    assert failed["failed"] == "module 'torch' has no attribute 'bfloat16'"
    assert kernel["ratio_to_torch"] is None


@pytest.mark.parametrize("mask", [pytest.param("full", marks=pytest.mark.long), "causal"])
def test_pytorch_computes_the_same_attention(mask: str) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed (the extra `peers`)")
    with pytorch.worker({}, pytorch.Attention) as ask:
        for direction, arrays, dtype, limit in (
            ("forward", 1, "float32", 2e-6),
            ("both", 4, "float32", 2e-6),
            ("both", 4, "bfloat16", 2e-2),
        ):
            case = Case(dtype, 2, mask, 5, direction, heads=4, kv_heads=2, head_size=8)
            inputs = [np.asarray(x.astype(np.float32)) for x in draw_inputs(case)]
            assert ask("load", inputs, "cpu", dtype, mask, direction)["threads"] >= 1
            results = ask("run")
            assert len(results) == arrays
            visible = np.tri(5, dtype=bool)[None] if mask == "causal" else None
            error = exact(inputs, visible).error(results)
            assert error is not None
            assert error < limit
            assert ask("time", 3) > 0
        with pytest.raises(RuntimeError, match="must divide the number of heads"):
            ask("load", [inputs[0][:, :3], *inputs[1:]], "cpu", "float32", mask, "forward")
            ask("run")
