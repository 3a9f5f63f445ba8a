"""Counts what devices exchange in a compiled program."""

import math
import re
from dataclasses import dataclass
from typing import Any

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.-]+) \(")
_INSTRUCTION = re.compile(r"%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)")
_OPERAND = re.compile(r"%([\w.-]+)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_ARRAY = re.compile(r"\b[a-z]+(\d+)[a-z0-9]*\[([\d,]*)\]")


@dataclass(frozen=True)
class Exchange:
    """The collective operations of one kind in a program."""

    count: int  # of arrays; one operation may exchange several
    bytes: int  # of the arrays, before they are scattered or after they are gathered


def collectives(compiled: Any) -> dict[str, Exchange]:
    """Returns the collective operations of a compiled program by kind.

    Operations in the body of a loop are counted once. XLA's compiler for TPUs splits an operation
    into several with the same channel, which are counted once, too, and computes a reduce-scatter
    as a fusion around an all-reduce.
    """
    arrays_of: dict[tuple[str, str], list[int]] = {}
    results: dict[str, str] = {}
    scatters = False
    for line in compiled.as_text().splitlines():
        if computation := _COMPUTATION.match(line):
            scatters = computation[1].startswith("all-reduce-scatter")
        if not (instruction := _INSTRUCTION.search(line)):
            continue
        name, result, operation, rest = instruction.groups()
        results[name] = result
        kind = operation.removesuffix("-start")
        if kind not in KINDS:
            continue
        operands = " ".join(results.get(x, "") for x in _OPERAND.findall(rest.partition(")")[0]))
        larger = operands if kind == "reduce-scatter" else result
        sizes = [_bytes(*array) for array in _ARRAY.findall(larger)]
        if kind not in ("all-reduce", "reduce-scatter") and operation.endswith("-start"):
            sizes = [max(sizes)]  # the result also names operands and what the device waits for
        channel = None if kind == "collective-permute" else _CHANNEL.search(rest)
        key = "reduce-scatter" if scatters else kind, channel[1] if channel else name
        arrays_of[key] = max(arrays_of.get(key, []), sizes, key=sum)
    return {
        kind: Exchange(sum(map(len, sizes)), sum(map(sum, sizes)))
        for kind in KINDS
        if (sizes := [arrays for (each, _), arrays in arrays_of.items() if each == kind])
    }


def _bytes(bits: str, shape: str) -> int:
    return math.prod(int(size) for size in shape.split(",") if size) * int(bits) // 8
