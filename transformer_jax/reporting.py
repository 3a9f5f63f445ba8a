"""What training tells, and where: the terminal, metrics.jsonl, TensorBoard.

Training emits records, plain dicts with a "kind": "train" (a line of metrics), "evaluation"
(development scores and sample translations) and "message". A reporter is any function of a record.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

Record = dict[str, Any]
Reporter = Callable[[Record], None]


class Terminal:
    """A live line with a bar on a terminal, plain lines elsewhere; evaluations stay above it."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
        columns = (BarColumn(bar_width=16), TextColumn("{task.description}", markup=False))
        self._live = self._console.is_terminal
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task("", total=1.0)

    def __enter__(self) -> Terminal:
        if self._live:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._progress.stop()

    def __call__(self, record: Record) -> None:
        if record["kind"] == "train" and self._live:
            where, values = _train_parts(record)
            left = f"{where}  {_time_left(record['seconds_left'])}\n{values}"  # fits 80 columns
            self._progress.update(self._task, completed=record["done"], description=left)
        else:
            self._console.print(describe(record), markup=False)


class MetricsFile:
    """Appends each record but messages to a JSONL file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, record: Record) -> None:
        if record["kind"] != "message":
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def cut(self, step: int) -> None:
        """Drops the records after `step`, which a continued run will write again."""
        if self._path.exists():
            kept = [record for record in read_metrics(self._path) if record["step"] <= step]
            text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._path)


class TensorBoard:
    """Scalars as TensorBoard events; needs the extra `tensorboard`."""

    def __init__(self, folder: Path) -> None:
        if importlib.util.find_spec("tensorboardX") is None:
            raise ValueError(
                "--tensorboard: needs tensorboardX; pip install 'transformer-jax[tensorboard]'"
            )
        self._folder = folder
        self._writer: Any = None  # made with the first record: it makes the folder

    def __call__(self, record: Record) -> None:
        if record["kind"] == "message":
            return
        if self._writer is None:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        flat = dict(record)
        for name, scores in flat.pop("sets", {}).items():
            flat |= {f"{name}/{key}": value for key, value in scores.items()}
        for name, value in flat.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()


def read_metrics(path: Path) -> list[Record]:
    """The records of a metrics file; a last line cut short by a crash is left out."""
    records: list[Record] = []
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def describe(record: Record) -> str:
    """A record in words."""
    if record["kind"] == "message":
        return record["text"]
    if record["kind"] == "train":
        return "  ".join([*_train_parts(record), _time_left(record["seconds_left"])])
    lines = [f"step {record['step']:>6}  evaluation{'  (best so far)' if record['best'] else ''}"]
    for name, scores in record["sets"].items():
        values = "  ".join(f"{key} {value:.4g}" for key, value in scores.items())
        lines.append(f"    {name}: {values}")
    for source, output, reference in record["samples"]:
        lines += [f"    source     {source}", f"    output     {output}"]
        lines.append(f"    reference  {reference}")
    return "\n".join(lines)


def _train_parts(record: Record) -> tuple[str, str]:
    """Where training is, and how it goes."""
    where = f"step {record['step']:>6}  epoch {record['epoch']:>3}"
    values = (
        f"loss {record['loss']:.3f}  {record['tokens_per_s']:>6.0f} tok/s  "
        f"fill {record['fill']:.0%}  lr {record['lr']:.2e}  grad {record['grad_norm']:.2f}"
    )
    return where, values


def _time_left(seconds: float | None) -> str:
    if seconds is None:
        return "time left unknown"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return (
        f"{hours}h{minutes % 60:02}m left" if hours else f"{minutes}m{int(seconds % 60):02}s left"
    )
