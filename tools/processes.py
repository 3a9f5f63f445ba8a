"""Runs `transformer-jax` in processes of its own, with faults at chosen moments.

    FAULT='{"at": "saving", "nth": 2, "signals": [9]}' python -m tools.processes train ...

`start` runs this. Each process that the command starts runs it, too.
"""

import itertools
import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGINT, SIGKILL, default_int_handler, signal
from typing import Any

import numpy as np

from transformer_jax.cli import launch
from transformer_jax.cli.main import main as command_line
from transformer_jax.decoding.translator import Translator
from transformer_jax.runs.checkpoint import Checkpoints
from transformer_jax.special_ids import PAD
from transformer_jax.training import trainer
from transformer_jax.training.setup import StepSetup
from transformer_jax.training.validation import DevScores
from transformer_jax.types import Batch

PHASES: dict[str, tuple[Any, str]] = {
    "training": (StepSetup, "compile_gradients"),  # the function that it returns, at each step
    "saving": (Checkpoints, "_finish"),
    "evaluating": (DevScores, "__call__"),
    "decoding": (Translator, "__call__"),
}
"""Functions that are called at the beginning of a phase and return at its end."""

OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove")
"""Audit events of Python, which come before an operation on a file."""

PAUSE = 3.0
"""Seconds between two signals, which are one if the first is not handled before the second."""

AS_USER = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
"""Takes from root what lets it write to read-only folders."""


@dataclass(frozen=True)
class Fault:
    """What happens to a process, and when.

    at: one of `PHASES`, or a regular expression for one of `OPERATIONS` and its arguments, such as
    r"os.rename .*/00000008.new1". nth: which call or operation. delay: seconds of the phase before
    the fault; 0: it comes before the phase.
    """

    at: str = ""
    nth: int = 1
    delay: float = 0.0
    process: int | None = None  # that it happens to; None: to all
    signals: tuple[int, ...] = ()  # sent to the command one by one; SIGKILL to the process itself
    hold: str = ""  # file that is made, and whose deletion is awaited
    limit: int | None = None  # largest size of a file from now on, in bytes
    read_only: str = ""  # folder that becomes read-only, relative to the run
    compiles: bool = False  # from the start, without the programs that others have compiled
    record: str = ""  # from the start, name of files for the rows that devices are given


def start(
    *arguments: str, fault: Fault | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Starts a command, with changes of the environment."""
    as_user, fault = AS_USER if os.geteuid() == 0 else [], fault or Fault()
    changes = {"FAULT": json.dumps(asdict(fault)), **(environment or {})}
    if fault.compiles:
        changes["JAX_COMPILATION_CACHE_DIR"] = ""
    return subprocess.Popen(
        [*as_user, sys.executable, "-m", "tools.processes", *arguments],
        env=os.environ | changes,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,  # a file would be limited in size, too
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Waits until a command and all its processes, which hold the pipe open, have ended.

    Returns its status as a shell does, and what it has written to standard error.
    """
    _, error = process.communicate(timeout=600)
    status = process.returncode
    return (status if status >= 0 else 128 - status), error


def children(process: subprocess.Popen[str]) -> list[int]:
    """Returns the numbers of the processes that a command has started."""
    return [*map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())]


def inject(fault: Fault) -> None:
    """Makes a fault happen in this process."""
    numbers = itertools.count(1)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        matches = event in OPERATIONS and re.search(fault.at, f"{event} {arguments[:2]}")
        if matches and next(numbers) == fault.nth:
            happen(fault)

    def phase(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(numbers) != fault.nth:
                return function(*arguments, **options)
            thread = threading.Thread(target=happen, args=(fault,))
            thread.start()
            if not fault.delay:
                thread.join()
            try:
                return function(*arguments, **options)
            finally:
                thread.join()

        return call

    if fault.at in PHASES:
        owner, name = PHASES[fault.at]
        function = getattr(owner, name)
        of_returned = fault.at == "training"
        setattr(owner, name, (lambda *a: phase(function(*a))) if of_returned else phase(function))
    else:
        sys.addaudithook(audit)


def happen(fault: Fault) -> None:
    """Lets a fault happen."""
    time.sleep(fault.delay)
    if fault.hold:
        Path(fault.hold).touch()
        while Path(fault.hold).exists():
            time.sleep(0.02)
    if fault.limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.limit, fault.limit))
    if fault.read_only:
        run = next(x for x in sys.argv if x.startswith("--run=")).removeprefix("--run=")
        Path(os.path.normpath(Path(run, fault.read_only))).chmod(0o500)  # a run may not be there
    command = os.getppid() if sys.argv[1].isdigit() else os.getpid()
    for number in fault.signals:
        os.kill(os.getpid() if number == SIGKILL else command, number)
        time.sleep(PAUSE)


def record_rows(path: Path) -> None:
    """Writes the source ids of the rows of each batch that this process gives its devices."""
    place = trainer.shard_batch

    def recorded(batch: Batch, mesh: Any) -> Any:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(sources(batch)) + "\n")
        return place(batch, mesh)

    trainer.shard_batch = recorded


def sources(batch: Batch) -> list[list[int]]:
    """Returns the source ids of the rows that are not empty."""
    rows = [row[row != PAD].tolist() for row in np.asarray(batch.source)]
    return [row for row in rows if row]


def main() -> None:
    """Runs a command, or one of the processes that `--processes` starts, with a fault."""
    fault = Fault(**json.loads(os.environ["FAULT"]))
    signal(SIGINT, default_int_handler)  # shells ignore it for what they start in the background
    index = re.search(r"--process=(\d+)/", " ".join(sys.argv))
    process = int(index[1]) if index else 0
    if fault.record:
        record_rows(Path(f"{fault.record}.{process}"))
    if fault.at and fault.process in (None, process):
        inject(fault)
    if sys.argv[1].isdigit():
        launch._run()
    else:
        launch.__name__ = "tools.processes"  # the module that its processes run
        command_line()


if __name__ == "__main__":
    main()
