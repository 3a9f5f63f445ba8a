"""`transformer-jax bench attention`: what it measures, judges, writes and refuses."""

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from common import Capture, Patch, error_line

from transformer_jax.attention import Mask
from transformer_jax.benchmark import attention, attention_report, pytorch, timing
from transformer_jax.benchmark import exact as exact_module
from transformer_jax.benchmark.attention import Case
from transformer_jax.benchmark.attention_report import exponent, summary
from transformer_jax.benchmark.exact import exact
from transformer_jax.benchmark.settings import AttentionBenchmark
from transformer_jax.cli.main import main
from transformer_jax.parallel import devices

SMALL = ["--heads=2", "--head-size=4", "--batches", "1"]

MODULE = """
from transformer_jax.attention import attend

def twice(query, key, value, mask, *, bias, dropout):
    output, _ = attend(query, key, value, mask, kernel="reference")
    return 2 * output, None

def nan(query, key, value, mask, *, bias, dropout):
    output, _ = attend(query, key, value, mask, kernel="reference")
    return float("nan") * output, None

def positional(query, key, value, mask):
    return value, None

def narrow(query, key, value, mask, *, bias, dropout):
    return value[..., :1], None
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: Patch, tmp_path: Path) -> None:
    """Few samples, without PyTorch, in a folder with a module of the user's."""
    monkeypatch.setattr(timing, "SAMPLE_S", 1e-4)
    monkeypatch.setattr(attention, "MAX_SAMPLES", 2)
    monkeypatch.setattr(pytorch, "workers", lambda platform, peer: contextlib.nullcontext({}))
    (tmp_path / "my_kernels.py").write_text(MODULE, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def bench(*arguments: str) -> None:
    main(["bench", "attention", *SMALL, *arguments])


@pytest.mark.long
def test_kernels_are_measured_and_a_wrong_one_is_found(tmp_path: Path, capsys: Capture) -> None:
    kernels = ["--kernels", "auto", "blockwise", "my_kernels:twice", "my_kernels:nan"]
    bench("--lengths=8", "--masks=causal", *kernels, "--out", "made/x", "--dump", "hlo")
    lines = capsys.readouterr().out.splitlines()
    forward = {line.split()[2]: line for line in lines if " forward " in line}
    assert " 1.0e+00 > 2e-06 " in forward.pop("my_kernels:twice")
    assert " not finite " in forward.pop("my_kernels:nan")
    assert set(forward) == {"reference", "blockwise"}
    assert not any(mark in line for line in forward.values() for mark in (">", "not finite"))

    contents = json.loads((tmp_path / "made/x.json").read_text("utf-8"))
    errors = {record["kernel"]: record["error"] for record in contents["records"]}
    assert errors["blockwise"] < 2e-6
    assert errors["my_kernels:twice"] == pytest.approx(1)
    assert errors["my_kernels:nan"] is None
    assert len(contents["records"]) == 2 * 4  # directions, kernels
    for record in contents["records"]:
        assert record["median_s"] > 0
        assert record["gflops"] > 0
        assert record["share_of_matmuls"] > 0
        arrays = {"forward": 3, "both": 4}[record["direction"]]
        scores = 4 * 2 * record["length"] ** 2
        assert record["temporaries_bytes"] is None or record["temporaries_bytes"] >= scores
        assert record["input_bytes"] == arrays * 4 * 2 * record["length"] * 4
        assert record["auto"] == (record["kernel"] == "reference")
    assert (tmp_path / "made/x.svg").stat().st_size > 0
    dumped = {path.name for path in (tmp_path / "hlo").iterdir()}
    assert len(dumped) == len(contents["records"])
    name = "my_kernels.twice-float32-1-causal-8-both.hlo.txt"
    assert "HloModule" in (tmp_path / "hlo" / name).read_text("utf-8")


def test_a_case_that_does_not_fit_is_reported_and_the_others_are_measured(
    capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(devices, "usable_host_memory", lambda: 40_000)
    bench("--lengths", "16", "512", "--kernels", "reference", "--masks", "full")
    out = capsys.readouterr().out
    needed = 3 * 4 * 4 * 2 * 512 * 4
    assert f"does not fit: needs {needed:,} bytes, 40,000 are available" in out
    assert sum("does not fit" in line for line in out.splitlines()) == 2
    assert sum(line.startswith("      16") for line in out.splitlines()) == 2


def test_scores_that_do_not_fit_are_found_where_a_library_holds_them(
    capsys: Capture, monkeypatch: Patch
) -> None:
    scores = 4 * 8 * 512 * 512
    monkeypatch.setattr(devices, "usable_host_memory", lambda: scores)
    sizes = ["--lengths=512", "--heads=8", "--head-size=16", "--batches=1", "--masks=full"]
    main(["bench", "attention", *sizes, "--kernels", "reference", "blockwise"])
    told = re.findall("does not fit: needs ([0-9,]*) bytes", capsys.readouterr().out)
    needed = [int(size.replace(",", "")) for size in told]
    assert len(needed) == 2 * 2  # directions, and both kernels: one block is all there is
    assert min(needed) > scores


def test_a_kernel_that_fails_is_reported_and_the_others_are_measured(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    compile_kernel = attention.compile_kernel

    def fail(case: Any, kernel: str, *more: Any) -> Any:
        if kernel == "blockwise":
            raise RuntimeError("INTERNAL: not\non this device")
        return compile_kernel(case, kernel, *more)

    monkeypatch.setattr(attention, "compile_kernel", fail)
    one = ["--masks", "full", "--kernels", "blockwise"]
    bench("--lengths", "8", *one, "reference", "--out", "x.json")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("       8")]
    assert ["failed: INTERNAL: not on this device" in line for line in lines] == [True, False] * 2
    records = json.loads((tmp_path / "x.json").read_text("utf-8"))["records"]
    assert [r["kernel"] for r in records if "median_s" in r] == ["reference"] * 2
    assert (tmp_path / "x.svg").exists()
    bench("--lengths", "8", *one, "--out", "y")  # there is nothing to plot
    assert (tmp_path / "y.json").exists()


@pytest.mark.parametrize("length", [4, 2**16])
def test_matmuls_of_long_sentences_need_little_memory(length: int) -> None:
    case = Case("float32", 1, "full", length, "forward", heads=1, kv_heads=1, head_size=1)
    call, flops = attention.matmuls(case)
    assert flops == 2 * 2 * attention.STEPS * attention.SCORES_PER_STEP
    (total,) = call()
    assert total.shape == (attention.SCORES_PER_STEP // length, 1)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("narrow", "(1, 2, 8, 4), weights or None), not (1, 2, 8, 1)"),
        ("positional", "kernel 'my_kernels:positional': TypeError: "),
    ],
)
def test_a_kernel_that_cannot_be_called(kernel: str, words: str, capsys: Capture) -> None:
    command = ["bench", "attention", *SMALL, "--lengths=8", f"--kernels=my_kernels:{kernel}"]
    assert words in error_line(command, capsys)


def test_without_names_all_kernels_that_run_here_are_measured() -> None:
    settings = AttentionBenchmark(lengths=(8,), heads=2, head_size=4)
    assert attention.supported_kernels(settings) == ("auto", "reference", "blockwise", "xla")


SEGMENTS = np.array([[1, 1, 2, 2, 2], [1, 1, 1, 1, 0]])
PACKED = Mask(SEGMENTS, key_segments=SEGMENTS)


@pytest.mark.parametrize(
    "mask",
    [None, Mask(causal=True), Mask(window=1), PACKED, replace(PACKED, causal=True, window=1)],
    ids=["none", "causal", "window", "packed", "packed causal window"],
)
def test_the_exact_output_is_that_of_the_formula_and_has_the_exact_gradients(
    mask: Mask | None, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(exact_module, "ROWS", 4)  # of scores at a time, two for each query
    visible = None if mask is None else np.asarray(mask.dense(5, 5))[:, 0]
    rng = np.random.default_rng(0)
    query, gradient = rng.standard_normal((2, 2, 4, 5, 3))  # two queries for each head of keys
    arrays = [query, *rng.standard_normal((2, 2, 2, 5, 3)), gradient]
    true = exact(arrays, visible)
    assert true.heads == [0, 1, 2, 3]
    key, value = (np.repeat(x, 2, axis=1) for x in arrays[1:3])
    weights = np.exp(query @ key.swapaxes(-1, -2) / 3**0.5)
    weights *= 1 if visible is None else visible[:, None]
    output = weights / (weights.sum(-1, keepdims=True) + 1e-300) @ value
    np.testing.assert_allclose(true.arrays[0], output.reshape(4, 2, 5, 3), rtol=1e-12, atol=1e-12)

    def total(which: int, change: np.ndarray) -> float:
        moved = [x + change if i == which else x for i, x in enumerate(arrays)]
        return float(np.sum(exact(moved, visible).arrays[0] * gradient.reshape(4, 2, 5, 3)))

    for which in range(3):
        way = rng.standard_normal(arrays[which].shape)
        slope = (total(which, 1e-4 * way) - total(which, -1e-4 * way)) / 2e-4
        product = true.arrays[1 + which] * way.reshape(true.arrays[1 + which].shape)
        assert slope == pytest.approx(float(np.sum(product)), 1e-6)


def test_the_error_of_some_heads_is_of_those() -> None:
    arrays = [jax.random.normal(jax.random.key(i), (2, 3, 4, 2)) for i in range(4)]
    true = exact(arrays, all_heads=False)
    assert true.heads == [0, 5]
    whole = exact(arrays)
    output = jax.numpy.asarray(whole.arrays[0].reshape(2, 3, 4, 2), "float32")
    elsewhere, here = output.at[0, 1].add(1.0), output.at[1, 2].add(1.0)
    errors = [true.error([x]) or 0.0 for x in (output, elsewhere, here)]
    assert errors[0] < 1e-6
    assert errors[1] == errors[0]
    assert errors[2] > 0.1
    assert true.error([output.at[1, 2, 0, 0].set(jax.numpy.nan)]) is None


def test_the_summary_holds_ratios_and_exponents() -> None:
    case = {"dtype": "float32", "batch": 1, "mask": "full", "direction": "both", "error": 1e-7}
    auto = case | {"kernel": "blockwise", "auto": True}
    records = []
    for n in (256, 1024, 4096):
        ratios = {"ratio_to_torch": n / 2, "ratio_to_torch_spread": [n / 9, n]}
        times = {"length": n, "median_s": 3e-9 * n**2, "temporaries_bytes": 8 * n}
        records.append(auto | ratios | times)
    last = case | {"length": 4096, "median_s": 1.0, "ratio_to_torch": None}
    records.append(last | {"kernel": "reference", "temporaries_bytes": 80 * 4096})
    records.append(last | {"kernel": "torch", "version": "2", "threads": 4})
    values = summary(records)
    assert values["pytorch"] == {"version": "2", "threads": 4}
    assert values["ratio_to_torch"]["both"]["1"] == {"256": 128, "1024": 512, "4096": 2048}
    assert values["ratio_to_torch_causal_spread"] == {}
    assert exponent(records[:3], "median_s") == pytest.approx(2)
    assert exponent(records[:1], "median_s") is None
    assert "blockwise: T^2.0" in attention_report.curves(records)["forward and backward, ms"]
