"""Reports training on the terminal, in metrics.jsonl and to TensorBoard.

Training emits records: dicts whose "kind" is "train" (metrics), "evaluation" (development scores
and sample translations) or "message". A reporter is any function of a record.
"""

import importlib.util
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from typing import Any

from etils import epath
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from transformer_jax.errors import UserError, printable
from transformer_jax.files import AnyPath, named, parse_json, write_whole

logger = logging.getLogger(__name__)

Record = dict[str, Any]
Reporter = Callable[[Record], None]


def guarded(reporter: Reporter) -> Reporter:
    """Returns a reporter that calls `reporter` until it raises, and then warns and leaves it
    out."""
    failed = False

    def call(record: Record) -> None:
        nonlocal failed
        if failed:
            return
        try:
            reporter(record)
        except Exception as error:  # the user's function may raise anything
            failed = True
            logger.warning("%s; training goes on without this reporter", printable(str(error)))

    return call


def report(reporters: Sequence[Reporter], kind: str, step: int, **values: Any) -> None:
    """Gives each reporter a record."""
    for reporter in reporters:
        reporter({"kind": kind, "step": step, **values})


class Terminal(AbstractContextManager["Terminal"]):
    """Prints a live line with a progress bar on a terminal, and plain lines elsewhere.

    Evaluations and messages remain above the live line.
    """

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()  # Jupyter sets FORCE_COLOR, by which Rich would decide
        options: Any = {"highlight": False, "soft_wrap": True, "emoji": False}
        self._console = Console(stderr=True, force_terminal=self._live, **options)
        columns = (BarColumn(bar_width=16), TextColumn("{task.description}", markup=False))
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task("", total=1.0)

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._progress.stop()

    def __call__(self, record: Record) -> None:
        if self._live:
            self._progress.start()  # once; a process that reports nothing shows nothing
        if record["kind"] == "train" and self._live:
            where, values = _train_parts(record)
            left = f"{where}  {_time_left(record['seconds_left'])}\n{values}"  # fits 80 columns
            self._progress.update(self._task, completed=record["done"], description=left)
        else:
            self._console.print(describe(record), markup=False)


class MetricsFile(AbstractContextManager["MetricsFile"]):
    """Appends each record that is not a message, with the time (UTC), to a JSONL file, a line each.

    Object storage cannot append: there the file is written anew by `flush`, which the trainer calls
    before it saves a checkpoint, and after each evaluation. It is a context manager that flushes.
    """

    def __init__(self, path: AnyPath) -> None:
        self._path = path
        self._lines: list[str] = []  # all those of an object
        self._flushed = 0  # number of them

    def __exit__(self, *_: object) -> None:
        self.flush()

    def __call__(self, record: Record) -> None:
        if record["kind"] == "message":
            return
        line = _line(record | {"time": datetime.now(UTC).isoformat(timespec="seconds")})
        if isinstance(self._path, epath.Path):
            self._lines.append(line)
            if record["kind"] == "evaluation":
                self.flush()
        else:
            with named(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(line)

    def cut(self, step: int, evaluated: int, expected: int = 0) -> None:
        """Drops the records after `step` and the evaluations after `evaluated`, which a continued
        run writes again, and damaged lines.

        Warns of damaged lines, and if no record is as late as the step `expected`. The file is a
        log: training does not need it.
        """
        records, problems = whole_records(self._path)
        for problem in problems:
            logger.warning("%s; the line is dropped", problem)
        last: dict[Any, int] = {"evaluation": evaluated}  # of these; of other records, `step`
        records = [each for each in records if each["step"] <= last.get(each.get("kind"), step)]
        if (newest := last_step(records)) < expected:
            lost = newest + 1, expected
            logger.warning("%s: records of steps %d to %d are lost", self._path, *lost)
        if self._path.exists():
            lines = [_line(record) for record in records]
            write_whole(self._path, "".join(lines))
            if isinstance(self._path, epath.Path):
                self._lines, self._flushed = lines, len(lines)

    def flush(self) -> None:
        """Writes the records that are not written yet."""
        if self._flushed < len(self._lines):
            write_whole(self._path, "".join(self._lines))
            self._flushed = len(self._lines)


class TensorBoard(AbstractContextManager["TensorBoard"]):
    """Writes scalars as TensorBoard events. Needs the extra `tensorboard`.

    They are on the disk when a call returns: training does not repeat the steps before its last
    checkpoint. It is a context manager that closes the file.

    folder: in that of the run. The first record names the step at which the run continues, whose
    evaluation may be repeated: TensorBoard drops all of this step, and what the metrics file of the
    run has kept of it is written again.
    """

    def __init__(self, folder: AnyPath) -> None:
        if isinstance(folder, epath.Path):
            raise UserError(f"--tensorboard: needs a run on a disk, not {folder.parent}")
        if importlib.util.find_spec("tensorboardX") is None:
            raise UserError(
                "--tensorboard: needs tensorboardX; pip install 'transformer-jax[tensorboard]'"
                + f", or rename {folder} to write no more of it" * folder.exists()
            )
        self._folder = folder
        self._writer: Any = None  # created with the first metrics, since it creates the folder
        self._first: int | None = None  # step of the first record
        self._kept: list[Record] = []

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            with suppress(OSError):  # tries to write again what could not be written
                self._writer.close()

    def __call__(self, record: Record) -> None:
        if self._first is None:
            self._first = record["step"]
            records, _ = whole_records(self._folder.parent / "metrics.jsonl")
            self._kept = [each for each in records if each["step"] == self._first]
        if record["kind"] == "message":
            return
        with named(self._folder):
            for each in (*self._kept, record):
                self._write(each["step"], scalars(each))
        self._kept = []

    def _write(self, step: int, values: Mapping[str, int | float]) -> None:
        # Not by SummaryWriter, whose thread writes later and may end silently.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.summary import scalar

        # Its classes are made when it is imported, unknown to type checkers.
        proto: Any = importlib.import_module("tensorboardX.proto.event_pb2")
        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(self._folder / "events"))
            # TensorBoard then drops what a process that was killed had written of later steps.
            start = proto.SessionLog(status=proto.SessionLog.START)
            event = proto.Event(wall_time=time.time(), step=self._first, session_log=start)
            self._writer.write_event(event)
        for name, value in values.items():
            event = proto.Event(wall_time=time.time(), step=step, summary=scalar(name, value))
            self._writer.write_event(event)
        self._writer.flush()


def scalars(record: Record) -> dict[str, int | float]:
    """Returns the numbers of a record by the names that they have in TensorBoard, such as
    "dev/bleu" for a score of the corpus dev."""
    flat = {name: value for name, value in record.items() if name != "step"}
    for name, scores in flat.pop("sets", {}).items():
        flat |= {f"{name}/{key}": value for key, value in scores.items()}
    flat |= {f"pairs/{name}": count for name, count in flat.pop("pairs", {}).items()}
    return {name: value for name, value in flat.items() if isinstance(value, int | float)}


def read_metrics(path: AnyPath) -> list[Record]:
    """Returns the records of a metrics file. Ignores a last line that a crash has truncated.

    UserError: another line is not a record; it is named by its number.
    """
    records, problems = whole_records(path)
    if problems:
        raise UserError(f"{problems[0]}; delete the line")
    return records


def whole_records(path: AnyPath) -> tuple[list[Record], list[str]]:
    """Returns the records of a metrics file, and what is wrong with each of its other lines.

    Ignores a last line that a crash has truncated. There is nothing in a missing file.
    """
    records: list[Record] = []
    problems: list[str] = []
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise UserError("must be an object with a step")
            records.append(record)
        except UserError as error:
            problems.append(f"{path}: line {number}: {error}")
    return records, problems


def last_step(records: Sequence[Record]) -> int:
    """Returns the step of the last record; 0 if there is none."""
    return max((record["step"] for record in records), default=0)


def describe(record: Record) -> str:
    """Returns a record as text."""
    if record["kind"] == "message":
        return printable(record["text"])
    if record["kind"] == "train":
        return "  ".join([*_train_parts(record), _time_left(record["seconds_left"])])
    lines = [f"step {record['step']:>6}  evaluation{'  (best so far)' if record['best'] else ''}"]
    for name, scores in record["sets"].items():
        values = "  ".join(f"{key} {value:.4g}" for key, value in scores.items())
        lines.append(f"    {printable(name)}: {values}")
    for source, output, reference in (map(printable, sample) for sample in record["samples"]):
        lines += [f"    source     {source}", f"    output     {output}"]
        lines.append(f"    reference  {reference}")
    return "\n".join(lines)


def _line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _train_parts(record: Record) -> tuple[str, str]:
    """Returns the step and epoch, and the metrics, as text."""
    where = f"step {record['step']:>6}  epoch {record['epoch']:>3}"
    mfu = f"mfu {record['mfu']:.1%}  " if "mfu" in record else ""
    values = (
        f"loss {record['loss']:.3f}  {record['tokens_per_s']:>6.0f} tok/s  {mfu}"
        f"padding {record['padding']:.0%}  lr {record['lr']:.2e}  grad {record['grad_norm']:.2f}"
    )
    return where, "  ".join([values, *_further_metrics(record), *_mixture(record)])


def _mixture(record: Record) -> list[str]:
    """Returns the fraction of the pairs that came from each corpus, if there are several."""
    pairs = record.get("pairs", {})
    total = sum(pairs.values()) or 1
    return [f"{printable(name)} {count / total:.0%}" for name, count in pairs.items()]


_FORMATTED = (
    *("kind", "step", "epoch", "done", "seconds_left", "minutes"),
    *("loss", "tokens_per_s", "target_tokens", "mfu", "padding", "lr", "grad_norm", "pairs"),
)


def _further_metrics(record: Record) -> list[str]:
    """Returns metrics that layers report, with short names where these are unambiguous."""
    short = {name: name.rpartition("/")[2] for name in record if name not in _FORMATTED}
    count = Counter(short.values())
    labels = {name: label if count[label] == 1 else name for name, label in short.items()}
    return [f"{label} {record[name]:.4g}" for name, label in labels.items()]


def _time_left(seconds: float | None) -> str:
    if seconds is None:
        return "time left unknown"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m left" if hours else f"{minutes}m{seconds:02}s left"
