"""Fills the templates of tools/tables.md, which show result files in README.md and docs/*.md."""

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

from transformer_jax.benchmark import results

Record = Mapping[str, Any]


def parts() -> dict[str, str]:
    """Returns the Markdown of each part of `tables.md`, by name."""
    text = Path(__file__).with_suffix(".md").read_text("utf-8")
    templates = re.findall(r"^<!-- (\w+): (\S+) -->\n((?:.+\n)+)", text, re.M)
    return {name: fill(name, source, template) for name, source, template in templates}


def fill(name: str, source: str, template: str) -> str:
    """Returns a template with the values of FILE, or of the rows below FILE/KEY."""
    file, _, key = source.partition("/")
    contents = results.read(file)
    contents["processor"] = processor(contents)
    if not template.startswith("|"):
        return show(template.strip(), contents)
    rows: Iterable[Record] = [contents]
    if name in ROWS:
        rows = ROWS[name](contents)
    elif key:
        rows = contents[key]
        if isinstance(rows, dict):
            lists = ((n, row if isinstance(row, list) else [row]) for n, row in rows.items())
            rows = [{"name": name, **row} for name, each in lists for row in each]
    head, *lines = (line[2:-2].split(" | ") for line in template.splitlines())
    return table(head, *([show(cell, row) for cell in line] for row in rows for line in lines))


def table(head: Sequence[str], *rows: Sequence[str]) -> str:
    """Returns a table as Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def show(template: str, record: Record) -> str:
    """Returns the text of a cell; "" where a value of it is missing."""
    try:
        return _Formatter().vformat(template, (), record)
    except (KeyError, TypeError):  # TypeError: the part that would hold it is None
        return ""


class _Formatter(string.Formatter):
    """Formats fields that are paths: "{bytes/int8:.1f/1024}"."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Record) -> tuple[Any, str]:
        def child(value: Any, name: str) -> Any:
            return value[int(name) if isinstance(value, list) else name]

        first, *rest = field_name.split("/")
        file = first.removesuffix(".json")
        return reduce(child, rest, kwargs[first] if file == first else results.read(file)), first

    def format_field(self, value: Any, format_spec: str) -> str:
        """Formats also the least and the largest of a list, a median with its quartiles, and 0
        without an exponent."""
        form, _, divisor = format_spec.partition("/")
        if isinstance(value, list):
            ends = (self.format_field(end(value), format_spec) for end in (min, max))
            return " to ".join(dict.fromkeys(ends))
        if isinstance(value, dict):
            median, low, high = (format(value[name], form) for name in ("median", "low", "high"))
            return f"{median} ({low} to {high})"
        if value == 0 and form.endswith("e"):
            return "0"
        return format(value / float(divisor) if divisor else value, form)


def processor(contents: Record) -> str:
    """Returns the accelerators that a result was trained or measured on, or cores and processor."""
    devices = contents.get("card", {}).get("provenance", {}).get("devices", {"platform": "cpu"})
    if devices["platform"] != "cpu":
        return f"{devices['count']} {devices['kind']}"
    machine = contents["machine"]
    if accelerators := machine.get("accelerators"):
        return f"{len(accelerators)} {accelerators[0]}"
    cores = machine["cores"]
    return f"{cores} CPU core{'' if cores == 1 else 's'} ({machine['processor']})"


def estimators(contents: Record) -> Iterator[Record]:
    """Yields the noise of each gradient, and its mean if that is above the noise."""
    samples = contents["estimators"]["samples"]
    for name, noise in contents["estimators"].items():
        if isinstance(noise, dict):
            clear = noise["squared_mean"] > noise["variance"] / samples
            squared_mean = f"{noise['squared_mean']:.1e}" if clear else "lost in the noise"
            yield {**noise, "name": name, "squared_mean": squared_mean}


def attention(contents: Record) -> Iterator[Record]:
    """Yields PyTorch's time over that of kernel `auto`, with quartiles, for each length."""
    for mask, note in (("", ""), ("_causal", ", causal")):
        ratios, spreads = (contents[f"ratio_to_torch{mask}{end}"] for end in ("", "_spread"))
        rows: dict[str, Any] = {}
        for direction, batch in product(ratios, ("1", "8")):
            for length, median in ratios[direction].get(batch, {}).items():
                low, high = spreads[direction][batch][length]
                row = rows.setdefault(length, {"name": f"{int(length):,}{note}"})
                row[f"{direction} {batch}"] = {"median": median, "low": low, "high": high}
        yield from rows.values()


def windows(contents: Record) -> Iterator[Record]:
    """Yields each kind and width of a window, with its cost by length and direction."""
    kinds: dict[tuple[str, int], dict[str, Any]] = {}
    for row in contents["rows"]:
        kind, window = row["kind"], row["window"] or 0
        name = f"`{kind}`, D = {window}" if window else f"`{kind}`"
        costs = kinds.setdefault((kind, window), {"name": name})
        costs[f"{row['length']} {row['mode']}"] = row
    return (costs for _, costs in sorted(kinds.items()))


def signals(cases: Sequence[Record]) -> str:
    """Returns the number of signals, and the statuses with which runs ended."""
    statuses = {f"{case['signal']}: {case['status']}" for case in cases}
    return f"{len(cases)} ({', '.join(sorted(statuses))})"


ROWS: dict[str, Callable[[Record], Iterable[Record]]] = {
    "gradient_noise": estimators,
    "attention": attention,
    "windows": windows,
    "faults": lambda contents: [{**contents, "signals": signals(contents["signals"])}],
    "scaling": lambda contents: [
        {**row, "state": row["params_mib"] + row["rest_of_state_mib"]} for row in contents["rows"]
    ],
}
"""The rows of parts that are not stored as they are shown."""
