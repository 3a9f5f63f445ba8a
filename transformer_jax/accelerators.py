"""What is known of accelerators by the names that JAX gives them (`Device.device_kind`)."""

from __future__ import annotations

from typing import NamedTuple


class Accelerator(NamedTuple):
    """One device of a kind."""

    tflops: float  # peak of dense bfloat16 products (float16 where there is no bfloat16)
    memory_gib: int | None = None  # None: the device itself tells


ACCELERATORS: dict[str, Accelerator] = {
    "TPU v2": Accelerator(22.5, 8),  # a device is one of two cores of a chip
    "TPU v3": Accelerator(61.5, 16),  # likewise
    "TPU v4": Accelerator(275, 32),
    "TPU v5 lite": Accelerator(197, 16),
    "TPU v5": Accelerator(459, 95),
    "TPU v6 lite": Accelerator(918, 32),
    "V100": Accelerator(125),
    "T4": Accelerator(65),
    "A10G": Accelerator(70),
    "A10": Accelerator(125),
    "A100": Accelerator(312),
    "A30": Accelerator(165),
    "L40S": Accelerator(362),
    "L4": Accelerator(121),
    "H100 PCIe": Accelerator(756),
    "H100 NVL": Accelerator(835),
    "H100": Accelerator(989),
    "H200": Accelerator(989),
    "GH200": Accelerator(989),
    "B200": Accelerator(2250),
}
"""Accelerators by name, or by a part of the name, from the data sheets of Google and NVIDIA."""


def find_accelerator(device_kind: str) -> Accelerator | None:
    """Returns what is known of a kind of device, such as "NVIDIA H100 80GB HBM3"; None: nothing."""
    if device_kind in ACCELERATORS:
        return ACCELERATORS[device_kind]
    words = f" {device_kind.replace('-', ' ')} "
    return next((known for name, known in ACCELERATORS.items() if f" {name} " in words), None)
