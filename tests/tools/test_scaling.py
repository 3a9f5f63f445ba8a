"""The arithmetic of tools/scaling.py; its compiler needs the extra `tpu`."""

import pytest

from tools.scaling import CHIP, LINK_GBYTES, curves, estimate
from transformer_jax.parallel.devices import ACCELERATORS


def test_the_estimate_is_matmuls_and_bytes_over_peak_and_bandwidth() -> None:
    tflops = ACCELERATORS[CHIP].tflops
    half = {"count": 3, "bytes": LINK_GBYTES * 10**9 // 2}
    row = {"chips": 2, "tflop": 2 * tflops, "collectives": {"all-gather": half}}
    assert estimate(row) == {"matmuls_ms": 1000, "exchange_ms": pytest.approx(500)}
    row = {"chips": 4, "tflop": tflops, "collectives": {"all-reduce": half, "all-gather": half}}
    assert estimate(row) == {"matmuls_ms": 250, "exchange_ms": pytest.approx(1500)}


def test_a_line_for_each_mesh_shows_the_mebibytes_of_all_collectives() -> None:
    each = {"bytes": 2**20}
    two = {"all-gather": each, "all-reduce": each}
    rows = [
        {"model": "base", "mesh": "data", "chips": 8, "collectives": {"all-reduce": each}},
        {"model": "base", "mesh": "data", "chips": 32, "collectives": two},
        {"model": "big", "mesh": "fsdp", "chips": 8, "collectives": two},
    ]
    assert curves(rows)["panels"] == {
        "base: MiB exchanged in a step": {"data": [(8, 1), (32, 2)]},
        "big: MiB exchanged in a step": {"fsdp": [(8, 2)]},
    }
