"""Reports on the benchmark of attention: table lines, a summary, a result file and its plot."""

from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.benchmark import results
from transformer_jax.benchmark.settings import AttentionBenchmark

Record = dict[str, Any]

ERROR_LIMITS = {"float32": 2e-6, "bfloat16": 2e-2}
"""The largest error of a correct kernel, relative to the largest element in float64."""

MIN_LENGTH_OF_FIT = 256
"""Lengths from which exponents are fitted: below, calls cost more than arithmetic."""

_GROUP = ("dtype", "batch", "mask")
"""What is equal below one heading of the table, and in one plot."""


def table_lines(case: list[Record], before: list[Record]) -> list[str]:
    """Returns the lines of a case, below a heading if the records before it end with another dtype,
    batch or mask."""
    lines = [_line(record) for record in case]
    group = [case[0][name] for name in _GROUP]
    if not before or group != [before[-1][name] for name in _GROUP]:
        heading = _START.format("length", "direction", "kernel")
        heading += "".join(f" {title:>{width}}" for title, width, _ in _COLUMNS)
        return ["", "{}, batch {}, mask {}".format(*group), heading, *lines]
    return lines


def _line(record: Record) -> str:
    """Returns the line of a record: its measurements, or why there are none."""
    note = record.get("allocator", "auto" if record.get("auto") else "")
    label = record["kernel"] + (f" ({note})" if note else "")
    start = _START.format(record["length"], record["direction"], label)
    for reason in ("does_not_fit", "failed"):
        if reason in record:
            return f"{start}  {reason.replace('_', ' ')}: {record[reason]}"
    return start + "".join(f" {cell(record):>{width}}" for _, width, cell in _COLUMNS)


def _ratio(record: Record) -> str:
    if record["ratio_to_torch"] is None:
        return ""
    low, high = record["ratio_to_torch_spread"]
    return f"{record['ratio_to_torch']:.2f} ({low:.2f}-{high:.2f})"


def _error(record: Record) -> str:
    error, limit = record["error"], ERROR_LIMITS[record["dtype"]]
    if error is None:
        return "not finite"
    return f"{error:.1e}" + (f" > {limit:.0e}" if error > limit else "")


def _temporaries(record: Record) -> str:
    size = record["temporaries_bytes"]
    return "unknown" if size is None else f"{size / 2**20:,.1f} MiB"


_START = "{:>8} {:<9} {:<16}"
_COLUMNS: tuple[tuple[str, int, Callable[[Record], str]], ...] = (
    ("ms", 9, lambda r: f"{1e3 * r['median_s']:.3f}"),
    ("quartiles, ms", 15, lambda r: "-".join(f"{1e3 * s:.3f}" for s in r["spread_s"])),
    ("GFLOP/s", 8, lambda r: f"{r['gflops']:,.0f}"),
    ("of matmuls", 11, lambda r: f"{r['share_of_matmuls']:.0%}"),
    ("PyTorch/this", 19, _ratio),
    ("error", 15, _error),
    ("temporaries", 12, lambda r: _temporaries(r) if "compile_s" in r else ""),  # not of PyTorch
    ("compile", 8, lambda r: f"{r['compile_s']:.1f} s" if "compile_s" in r else ""),
)
"""Title, width and text of each column after the first three."""


def write(out: Path, command: str, settings: AttentionBenchmark, records: list[Record]) -> None:
    """Writes OUT.json and the plot OUT.svg; `out` may have either suffix."""
    from transformer_jax import plot

    sizes = {name: getattr(settings, name) for name in ("heads", "kv_heads", "head_size")}
    values = sizes | summary(records) | {"records": records}
    name = out.stem if out.suffix in (".json", ".svg") else out.name
    results.write(name, command, values, out.parent)
    if any("median_s" in record for record in records):
        plot.save(plot.scaling(curves(records)), out.parent / f"{name}.svg")


def summary(records: list[Record]) -> dict[str, Any]:
    """Returns PyTorch's version and threads, and its time over that of the kernel `auto` in float32
    by direction, batch and length, with quartiles: without a mask, and with the causal mask."""
    torch = next((r for r in records if "version" in r and "median_s" in r), None)
    values: dict[str, Any] = {"pytorch": torch and {x: torch[x] for x in ("version", "threads")}}
    for (mask, note), end in product((("full", ""), ("causal", "_causal")), ("", "_spread")):
        table: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
        for r in records:
            ratio = r.get(f"ratio_to_torch{end}") if r.get("auto") else None
            if ratio and (r["mask"], r["dtype"]) == (mask, "float32"):
                table[r["direction"]][str(r["batch"])][str(r["length"])] = ratio
        values[f"ratio_to_torch{note}{end}"] = table
    return values


def exponent(records: list[Record], value: str) -> float | None:
    """Returns p of value ∝ length^p by least squares, or None below two lengths with a value."""
    long = [r for r in records if r["length"] >= MIN_LENGTH_OF_FIT and r.get(value)]
    if len({r["length"] for r in long}) < 2:
        return None
    lengths, values = np.log([[r["length"], r[value]] for r in long]).T
    return float(np.polyfit(lengths, values, 1)[0])


def curves(records: list[Record]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Returns the lines to plot, by panel and kernel, for the first dtype, batch and mask.

    The kernel's name is followed by the fitted exponent.
    """
    first = {name: records[0][name] for name in _GROUP}
    shown = [r for r in records if "median_s" in r and first.items() <= r.items()]

    def panel(direction: str, value: str, scale: float) -> dict[str, list[tuple[int, float]]]:
        kernels: dict[str, list[Record]] = defaultdict(list)
        for r in shown:
            if r["direction"] == direction and r.get(value):
                kernels[r["kernel"]].append(r)
        lines: dict[str, list[tuple[int, float]]] = {}
        for kernel, curve in kernels.items():
            power = exponent(curve, value)
            name = kernel if power is None else f"{kernel}: T^{power:.1f}"
            lines[name] = [(r["length"], scale * r[value]) for r in curve]
        return lines

    return {
        "forward, ms": panel("forward", "median_s", 1e3),
        "forward and backward, ms": panel("both", "median_s", 1e3),
        "temporaries, forward and backward, MiB": panel("both", "temporaries_bytes", 2**-20),
    }
