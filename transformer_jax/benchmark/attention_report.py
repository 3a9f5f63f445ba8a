"""What the benchmark of attention says: the table that grows as it runs, and what sums it up."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

Record = dict[str, Any]

LIMITS = {"float32": 2e-6, "bfloat16": 2e-2}
"""The largest right error, relative to the largest element in float64."""

LONG = 256
"""Lengths from which exponents are fitted: below, calls cost more than arithmetic."""

_COLUMNS = (
    "  length direction kernel           ms  quartiles, ms   GFLOP/s  of products  PyTorch/this"
    "    error  temporaries  compile"
)


def print_record(record: Record, before: Record | None) -> None:
    """A line of the table, under a heading where another dtype, batch or mask begins."""
    heading = [record[name] for name in ("dtype", "batch", "mask")]
    if before is None or heading != [before[name] for name in ("dtype", "batch", "mask")]:
        print("\n{}, batch {}, mask {}\n{}".format(*heading, _COLUMNS))
    start = f"{record['length']:>8} {record['direction']:<9} {_label(record):<14}"
    for why in ("does_not_fit", "failed"):
        if why in record:
            print(f"{start}  {why.replace('_', ' ')}: {record[why]}", flush=True)
            return
    low, high = (1e3 * s for s in record["spread_s"])
    ratio = record["ratio_to_torch"]
    print(
        f"{start}{1e3 * record['median_s']:>9.3f} {f'{low:.3f}-{high:.3f}':>15}"
        f" {record['gflops']:>8,.0f} {record['share_of_products']:>11.0%}"
        f" {'' if ratio is None else f'{ratio:.2f}':>12} {_error(record):>11}"
        f" {_temporaries(record):>12} {_seconds(record):>8}",
        flush=True,
    )


def _label(record: Record) -> str:
    return record["kernel"] + (" (auto)" if record.get("auto") else "")


def _error(record: Record) -> str:
    error = record["error"]
    if error is None:
        return "WRONG nan"
    return f"{'WRONG ' if error > LIMITS[record['dtype']] else ''}{error:.0e}"


def _temporaries(record: Record) -> str:
    if "temporaries_bytes" not in record:  # PyTorch
        return ""
    size = record["temporaries_bytes"]
    return "untold" if size is None else f"{size / 2**20:,.1f} MiB"


def _seconds(record: Record) -> str:
    return f"{record['compile_s']:.1f} s" if "compile_s" in record else ""


def summary(records: list[Record]) -> dict[str, Any]:
    """Ratios, errors and exponents of all records.

    ratio_to_torch: PyTorch's time over that of the kernel `auto`, by direction, batch and length,
    without a mask in float32; ratio_to_torch_causal: with one. max_error: of each kernel in
    float32; None: not finite.
    memory_ratio_to_reference_at_4096: temporaries of `auto` over the reference's, both directions,
    batch 1. exponents: of time and temporaries in length, by mask, direction, batch and kernel.
    """
    measured = [r for r in records if "median_s" in r]
    return {
        "ratio_to_torch": _ratios(measured, "full"),
        "ratio_to_torch_causal": _ratios(measured, "causal"),
        "memory_ratio_to_reference_at_4096": _memory_ratio(records),
        "max_error": _errors(measured, "float32"),
        "max_error_bfloat16": _errors(measured, "bfloat16"),
        "error_limits": LIMITS,
        "exponents": _exponents(measured),
    }


def _ratios(records: list[Record], mask: str) -> dict[str, Any]:
    found: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
    for r in records:
        if r.get("auto") and r["mask"] == mask and r["dtype"] == "float32" and r["ratio_to_torch"]:
            found[r["direction"]][str(r["batch"])][str(r["length"])] = r["ratio_to_torch"]
    return found


def _memory_ratio(records: list[Record]) -> float | None:
    """Of what the compiled programs need, also where the reference's does not fit."""
    case = {"dtype": "float32", "batch": 1, "mask": "full", "length": 4096, "direction": "both"}
    same = [r for r in records if case.items() <= r.items() and r.get("temporaries_bytes")]
    auto = [r["temporaries_bytes"] for r in same if r.get("auto")]
    reference = [r["temporaries_bytes"] for r in same if r["kernel"] == "reference"]
    return auto[0] / reference[0] if auto and reference else None


def _errors(records: list[Record], dtype: str) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for r in (r for r in records if r["dtype"] == dtype):
        known, error = found.get(r["kernel"], 0.0), r["error"]
        found[r["kernel"]] = None if known is None or error is None else max(known, error)
    return found


def _exponents(records: list[Record]) -> list[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    names = ("dtype", "mask", "direction", "batch", "kernel")
    for r in records:
        if r["length"] >= LONG:
            groups[tuple(r[name] for name in names)].append(r)
    return [
        dict(zip(names, group, strict=True))
        | {
            "time": exponent(found, "median_s"),
            "temporaries": exponent(found, "temporaries_bytes"),
        }
        for group, found in groups.items()
    ]


def exponent(records: list[Record], value: str) -> float | None:
    """p of value ∝ length^p by least squares; None: fewer than two lengths have a value."""
    points = [(r["length"], r[value]) for r in records if r.get(value)]
    if len({length for length, _ in points}) < 2:
        return None
    lengths, values = np.log(np.array(points)).T
    return float(np.polyfit(lengths, values, 1)[0])


def curves(records: list[Record]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """What the plot shows of the first type, batch and mask: by panel and kernel, the values at
    each length, with the fitted exponent in the kernel's name."""
    names = ("dtype", "batch", "mask")
    first = {name: records[0][name] for name in names}
    panels = {
        "forward, ms": ("forward", "median_s", 1e3),
        "forward and backward, ms": ("both", "median_s", 1e3),
        "temporaries, forward and backward, MiB": ("both", "temporaries_bytes", 2**-20),
    }
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for title, (direction, value, scale) in panels.items():
        wanted = first | {"direction": direction}
        lines: dict[str, list[Record]] = defaultdict(list)
        for r in records:
            if wanted.items() <= r.items() and r.get(value) and "median_s" in r:
                lines[r["kernel"]].append(r)
        found[title] = {
            _named(kernel, exponent([r for r in line if r["length"] >= LONG], value)): [
                (r["length"], scale * r[value]) for r in line
            ]
            for kernel, line in lines.items()
        }
    return found


def _named(kernel: str, power: float | None) -> str:
    return kernel if power is None else f"{kernel}: T^{power:.1f}"
