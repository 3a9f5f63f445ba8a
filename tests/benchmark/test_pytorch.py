"""PyTorch's attention is timed in processes of its own."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from transformer_jax.benchmark import attention, pytorch, pytorch_worker, timing
from transformer_jax.benchmark.cases import Case, draw_inputs
from transformer_jax.benchmark.exact import exact
from transformer_jax.cli.main import main


def test_a_message_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "messages"
    arrays = [np.ones((2, 3, 1), np.float32), np.arange(6, dtype=np.float32).reshape(2, 3).T]
    with path.open("wb") as stream:
        pytorch_worker.send(stream, {"do": "run"}, arrays)
    with path.open("rb") as stream:
        received = pytorch_worker.receive(stream)
        assert received is not None
        assert pytorch_worker.receive(stream) is None
    assert received[0] == {"do": "run"}
    for found, wanted in zip(received[1], arrays, strict=True):
        np.testing.assert_array_equal(found, wanted)
    path.write_bytes(path.read_bytes()[:-1])  # its sender has died
    with path.open("rb") as stream:
        assert pytorch_worker.receive(stream) is None


class Fake(pytorch.Worker):
    """A worker without a process, with fixed times and correct results."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.facts = seconds, {"version": "1", "threads": 2}

    def load(self, case: Case, inputs: Sequence[jax.Array]) -> None:
        self.results = exact(inputs, causal=False).arrays[0].reshape(case.input_shapes[0])

    def seconds_per_call(self, count: int) -> float:
        return self.seconds

    def run(self) -> list[np.ndarray]:
        return [self.results]

    def unload(self) -> None:
        pass


def test_the_faster_allocator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_SAMPLES", 3)
    case = Case("float32", 1, "full", 4, "forward", heads=2, kv_heads=2, head_size=4)
    workers = {"default": Fake(2.0), "tuned": Fake(1.0)}
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


@pytest.fixture
def pytorch_worker_process() -> Iterator[pytorch.Worker]:
    """A worker with the default allocator, where PyTorch is installed."""
    pytest.importorskip("torch", reason="PyTorch is not installed (the extra `peers`)")
    worker = pytorch.Worker({})
    yield worker
    worker.close()


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_pytorch_computes_the_same_attention(
    pytorch_worker_process: pytorch.Worker, mask: str
) -> None:
    worker = pytorch_worker_process
    for direction, arrays, dtype, limit in (
        ("forward", 1, "float32", 2e-6),
        ("both", 4, "float32", 2e-6),
        ("both", 4, "bfloat16", 2e-2),
    ):
        case = Case(dtype, 2, mask, 5, direction, heads=4, kv_heads=2, head_size=8)
        inputs = draw_inputs(case)
        worker.load(case, inputs)
        results = worker.run()
        assert len(results) == arrays
        error = exact(inputs, causal=mask == "causal").error(results)
        assert error is not None
        assert error < limit
        assert worker.seconds_per_call(3) > 0
        worker.unload()
    assert worker.facts["threads"] >= 1
    with pytest.raises(RuntimeError, match="must divide the number of heads"):
        worker.load(case, [inputs[0][:, :3], *inputs[1:]])
        worker.run()
    worker.load(case, inputs)  # a worker that has failed goes on


def test_a_worker_that_has_ended_is_an_error(pytorch_worker_process: pytorch.Worker) -> None:
    worker = pytorch_worker_process
    case = Case("float32", 1, "full", 4, "forward", heads=1, kv_heads=1, head_size=4)
    worker.load(case, draw_inputs(case))
    worker._process.kill()
    with pytest.raises(RuntimeError, match="process ended with status"):
        worker.run()


@pytest.mark.long
def test_the_benchmark_times_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed (the extra `peers`)")
    monkeypatch.setattr(timing, "SAMPLE_S", 1e-4)
    monkeypatch.setattr(attention, "MAX_SAMPLES", 2)
    sizes = ["--lengths", "8", "--batches", "1", "--heads=2", "--head-size=4", "--masks", "full"]
    main(["bench", "attention", *sizes, "--out", str(tmp_path / "x")])
    found = json.loads((tmp_path / "x.json").read_text("utf-8"))
    torch = pytest.importorskip("torch")
    assert found["pytorch"]["version"] == torch.__version__
    assert found["pytorch"]["threads"] >= 1
    records = [r for r in found["records"] if r["kernel"] == "torch"]
    assert [r["direction"] for r in records] == ["forward", "both"]
    for record in records:
        assert set(record["median_s_by_allocator"]) == set(pytorch._allocators())
        assert record["error"] < 2e-6
    for direction in ("forward", "both"):
        low, high = found["ratio_to_torch_spread"][direction]["1"]["8"]
        assert low <= found["ratio_to_torch"][direction]["1"]["8"] <= high
    assert "torch (" in capsys.readouterr().out
