"""Reports on the benchmark of attention: table lines, a summary, a result file and its plot."""

from __future__ import annotations

from collections import defaultdict
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

_COLUMNS = (
    "  length direction kernel           ms  quartiles, ms   GFLOP/s  of products"
    "        PyTorch/this           error  temporaries  compile"
)


def table_lines(records: list[Record], previous: list[Record]) -> list[str]:
    """Returns the lines of a case, below a heading if the previous case had another dtype, batch or
    mask."""
    lines = [_line(record) for record in records]
    group = [records[0][name] for name in _GROUP]
    if not previous or group != [previous[0][name] for name in _GROUP]:
        return ["", "{}, batch {}, mask {}".format(*group), _COLUMNS, *lines]
    return lines


def _line(record: Record) -> str:
    start = f"{record['length']:>8} {record['direction']:<9} {_label(record):<14}"
    for reason in ("does_not_fit", "failed"):
        if reason in record:
            return f"{start}  {reason.replace('_', ' ')}: {record[reason]}"
    low, high = (1e3 * s for s in record["spread_s"])
    return (
        f"{start}{1e3 * record['median_s']:>9.3f} {f'{low:.3f}-{high:.3f}':>15}"
        f" {record['gflops']:>8,.0f} {record['share_of_products']:>11.0%}"
        f" {_ratio(record):>19} {_error(record):>15}"
        f" {_temporaries(record):>12} {_compile_time(record):>8}"
    )


def _label(record: Record) -> str:
    if "allocator" in record:
        return f"{record['kernel']} ({record['allocator']})"
    return record["kernel"] + (" (auto)" if record.get("auto") else "")


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
    if "temporaries_bytes" not in record:  # PyTorch
        return ""
    size = record["temporaries_bytes"]
    return "unknown" if size is None else f"{size / 2**20:,.1f} MiB"


def _compile_time(record: Record) -> str:
    return f"{record['compile_s']:.1f} s" if "compile_s" in record else ""


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
    """Returns ratios, errors and exponents of all records.

    pytorch: version and threads. ratio_to_torch: PyTorch's time over that of the kernel `auto`, by
    direction, batch and length, without a mask in float32, and its quartiles; _causal: with the
    causal mask. max_error: of each kernel in float32; None: not finite.
    memory_ratio_to_reference_at_4096: temporaries of `auto` over the reference's, both directions,
    batch 1. exponents: of time and temporaries in length, by mask, direction, batch and kernel.
    """
    measured = [r for r in records if "median_s" in r]
    return {
        "pytorch": _pytorch(measured),
        "ratio_to_torch": _by_case(measured, "full", "ratio_to_torch"),
        "ratio_to_torch_spread": _by_case(measured, "full", "ratio_to_torch_spread"),
        "ratio_to_torch_causal": _by_case(measured, "causal", "ratio_to_torch"),
        "ratio_to_torch_causal_spread": _by_case(measured, "causal", "ratio_to_torch_spread"),
        "memory_ratio_to_reference_at_4096": _memory_ratio(records),
        "max_error": _max_errors(measured, "float32"),
        "max_error_bfloat16": _max_errors(measured, "bfloat16"),
        "error_limits": ERROR_LIMITS,
        "exponents": _exponents(measured),
    }


def _pytorch(records: list[Record]) -> dict[str, Any] | None:
    """Returns PyTorch's version and threads; None if it was not measured."""
    found = ({name: r[name] for name in ("version", "threads")} for r in records if "version" in r)
    return next(found, None)


def _by_case(records: list[Record], mask: str, value: str) -> dict[str, Any]:
    """Returns a value of the kernel `auto` in float32 by direction, batch and length."""
    table: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
    for r in records:
        if r.get("auto") and r["mask"] == mask and r["dtype"] == "float32" and r.get(value):
            table[r["direction"]][str(r["batch"])][str(r["length"])] = r[value]
    return table


def _memory_ratio(records: list[Record]) -> float | None:
    """Uses what the compiled programs need, so that a reference that does not fit counts too."""
    case = {"dtype": "float32", "batch": 1, "mask": "full", "length": 4096, "direction": "both"}
    same = [r for r in records if case.items() <= r.items() and r.get("temporaries_bytes")]
    auto = [r["temporaries_bytes"] for r in same if r.get("auto")]
    reference = [r["temporaries_bytes"] for r in same if r["kernel"] == "reference"]
    return auto[0] / reference[0] if auto and reference else None


def _max_errors(records: list[Record], dtype: str) -> dict[str, float | None]:
    worst: dict[str, float | None] = {}
    for r in (r for r in records if r["dtype"] == dtype):
        known, error = worst.get(r["kernel"], 0.0), r["error"]
        worst[r["kernel"]] = None if known is None or error is None else max(known, error)
    return worst


def _exponents(records: list[Record]) -> list[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    names = ("dtype", "mask", "direction", "batch", "kernel")
    for r in records:
        if r["length"] >= MIN_LENGTH_OF_FIT:
            groups[tuple(r[name] for name in names)].append(r)
    return [
        dict(zip(names, group, strict=True))
        | {
            "time": exponent(members, "median_s"),
            "temporaries": exponent(members, "temporaries_bytes"),
        }
        for group, members in groups.items()
    ]


def exponent(records: list[Record], value: str) -> float | None:
    """Returns p of value ∝ length^p by least squares, or None below two lengths with a value."""
    points = [(r["length"], r[value]) for r in records if r.get(value)]
    if len({length for length, _ in points}) < 2:
        return None
    lengths, values = np.log(np.array(points)).T
    return float(np.polyfit(lengths, values, 1)[0])


def curves(records: list[Record]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Returns the lines to plot, by panel and kernel, for the first dtype, batch and mask.

    The kernel's name is followed by the fitted exponent.
    """
    first = {name: records[0][name] for name in _GROUP}
    panels = {
        "forward, ms": ("forward", "median_s", 1e3),
        "forward and backward, ms": ("both", "median_s", 1e3),
        "temporaries, forward and backward, MiB": ("both", "temporaries_bytes", 2**-20),
    }
    return {
        title: _panel(records, first | {"direction": direction}, value, scale)
        for title, (direction, value, scale) in panels.items()
    }


def _panel(
    records: list[Record], case: dict[str, Any], value: str, scale: float
) -> dict[str, list[tuple[int, float]]]:
    lines: dict[str, list[Record]] = defaultdict(list)
    for r in records:
        if case.items() <= r.items() and r.get(value) and "median_s" in r:
            lines[r["kernel"]].append(r)
    return {
        _with_exponent(kernel, line, value): [(r["length"], scale * r[value]) for r in line]
        for kernel, line in lines.items()
    }


def _with_exponent(kernel: str, line: list[Record], value: str) -> str:
    power = exponent([r for r in line if r["length"] >= MIN_LENGTH_OF_FIT], value)
    return kernel if power is None else f"{kernel}: T^{power:.1f}"
