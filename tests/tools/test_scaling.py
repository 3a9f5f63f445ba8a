"""The arithmetic of tools/scaling.py; its compiler needs the extra `tpu`."""

import pytest

from tools.scaling import CHIP, LINK_GBYTES, estimate
from transformer_jax.parallel.devices import ACCELERATORS


def test_the_estimate_is_matmuls_and_bytes_over_peak_and_bandwidth() -> None:
    tflops = ACCELERATORS[CHIP].tflops
    half = {"count": 3, "bytes": LINK_GBYTES * 10**9 // 2}
    row = {"chips": 2, "tflop": 2 * tflops, "collectives": {"all-gather": half}}
    assert estimate(row) == {"matmuls_ms": 1000, "exchange_ms": pytest.approx(500)}
    row = {"chips": 4, "tflop": tflops, "collectives": {"all-reduce": half, "all-gather": half}}
    assert estimate(row) == {"matmuls_ms": 250, "exchange_ms": pytest.approx(1500)}
