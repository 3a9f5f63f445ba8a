"""Runs `transformer-jax`, and writes down what it does, so that it can be stopped there.

    FAULTS='{"log": FILE}' python -m tools.faults_child train ...

Each line of the file is an event: {"at": seconds of the monotonic clock, "pid", "process", and
"phase" with "begin": true or false, "operation", or "step" of a step that was skipped}. Further
keys of FAULTS cause a fault:

    kill_at: [operation, n]         SIGKILL before the nth operation of this name on the run's files
    at_save: [n, "limit", bytes]    from the nth save on, no file may be larger
             [n, "read-only", 0]    before it, the folder of the checkpoints becomes read-only
    poison: [kind, every]           the loss or the gradient of one in `every` batches is not finite
    unprivileged: true              read-only folders stop root, too
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.cli import launch
from transformer_jax.cli.main import main as command_line
from transformer_jax.decoding.translator import Translator
from transformer_jax.runs import checkpoint
from transformer_jax.runs.checkpoint import Checkpoints
from transformer_jax.training import setup
from transformer_jax.training.setup import StepSetup
from transformer_jax.training.trainer import Trainer
from transformer_jax.training.validation import DevScores
from transformer_jax.types import Batch

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Log:
    """Appends events to a file, each in one write, which a signal does not tear."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        found = re.search(r"--process=(\d+)/", " ".join(sys.argv))
        self._process = int(found[1]) if found else 0

    def __call__(self, **event: Any) -> None:
        where = {"at": time.monotonic(), "pid": os.getpid(), "process": self._process}
        with suppress(OSError):  # the limit `at_save` concerns this file, too
            os.write(self._file, (json.dumps(where | event) + "\n").encode())

    def phase(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that is a phase."""

        @functools.wraps(function)
        def logged(*arguments: Any, **options: Any) -> Any:
            self(phase=name, begin=True)
            try:
                return function(*arguments, **options)
            finally:
                self(phase=name, begin=False)

        return logged


def log_phases(log: Log, at_save: tuple[int, str, int]) -> None:
    """Logs the phases of training, and causes the fault `at_save`."""
    for kind, method, name in (
        (Trainer, "run", "training"),
        (DevScores, "__call__", "evaluating"),
        (Translator, "__call__", "decoding"),
        (Checkpoints, "_publish", "publishing"),
        (checkpoint, "_remove", "deleting"),
    ):
        setattr(kind, method, log.phase(name, getattr(kind, method)))
    saves, (nth, fault, size) = Counter(), at_save
    save, finish = Checkpoints.save, Checkpoints._finish

    def begin(self: Checkpoints, *arguments: Any, **options: Any) -> None:
        saves["begun"] += 1
        if saves["begun"] == nth and fault == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        elif saves["begun"] == nth:
            Path(self._folder).chmod(0o500)
        log(phase="saving", begin=True)
        try:
            save(self, *arguments, **options)
        except BaseException:
            log(phase="saving", begin=False)
            raise

    def end(*arguments: Any) -> None:
        try:
            finish(*arguments)
        finally:
            log(phase="saving", begin=False)

    for name, function in {"save": begin, "_finish": end}.items():
        setattr(Checkpoints, name, function)
    compile_update = StepSetup.compile_update

    def compiled(self: StepSetup) -> Callable[..., Any]:
        return log_update(log, compile_update(self))

    StepSetup.compile_update = compiled


def log_update(log: Log, update: Any) -> Callable[..., Any]:
    """Logs the first call of the training step with each shape, which compiles it."""
    compiled: set[tuple[int, ...]] = set()

    def logged(state: Any, batch: Batch, key: Any) -> Any:
        shape = batch.source.shape + batch.target_out.shape
        call = update if shape in compiled else log.phase("compiling", update)
        compiled.add(shape)
        return call(state, batch, key)

    return logged


def log_operations(log: Log, run: str, name: str | None, nth: int) -> None:
    """Logs the changes that Python makes to files below `run`; kills the process before the `nth`
    one of this name. What TensorStore writes in C++ is not seen."""
    found: Counter[str] = Counter()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if (operation := operation_name(event, arguments, run)) is None:
            return
        found[operation] += 1
        log(operation=operation)
        if operation == name and found[operation] == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


def operation_name(event: str, arguments: tuple[Any, ...], run: str) -> str | None:
    """Returns the name of an operation that changes a file of the run, with N for numbers and X for
    random names."""
    if event == "open":
        path, _, flags = arguments
        if not flags & _WRITES:
            return None
        inside = True
    elif event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
        path = arguments[0]
        inside = event in ("os.remove", "os.rmdir") and arguments[1] >= 0  # below an open folder
    else:
        return None
    if not isinstance(path, str | bytes | os.PathLike):
        return None
    text = os.fsdecode(path)
    if text.startswith(run):
        text = text[len(run) :].lstrip("/")
    elif not inside or text.startswith("/"):
        return None
    text = re.sub(r"[0-9a-f]{16,}", "X", text)
    return f"{event.removeprefix('os.')} {re.sub(r'[0-9]+', 'N', text)}"


def poison(log: Log, kind: str, every: int) -> None:
    """Makes the loss or the gradient of some batches NaN or infinite, and logs what such steps
    change."""
    make, compile_update = setup.loss_fn, StepSetup.compile_update

    def poisoned(*arguments: Any) -> Any:
        loss = make(*arguments)

        def wrong(params: Any, batch: Batch, *rest: Any) -> Any:
            total, sums = loss(params, batch, *rest)
            chosen = jnp.sum(batch.source) % every == 0
            if kind == "gradient NaN":  # the value of the root is 0, its derivative infinite
                zero = jnp.sum(jax.tree.leaves(params)[0] * 0)
                root = jnp.sqrt(jnp.where(chosen, zero, 1.0))
                return total + root - jnp.where(chosen, 0.0, 1.0), sums
            bad = jnp.nan if kind == "loss NaN" else jnp.inf
            return total + jnp.where(chosen, bad, 0.0), sums

        return wrong

    def checked(self: StepSetup) -> Any:
        update = compile_update(self)

        def compared(state: Any, *rest: Any) -> Any:
            before = jax.tree.map(np.array, state)
            after, metrics = update(state, *rest)
            if not (np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"])):
                step = int(before.step)
                wanted = before._replace(step=np.asarray(step + 1, np.int32))
                same = jax.tree.map(
                    lambda a, b: a.tobytes() == np.asarray(b).tobytes(), wanted, after
                )
                paths = jax.tree_util.tree_leaves_with_path(same)
                changed = [jax.tree_util.keystr(path) for path, equal in paths if not equal]
                values = {k: repr(float(metrics[k])) for k in ("loss", "grad_norm")}
                log(step=step + 1, changed=changed, arrays=len(paths), **values)
            return after, metrics

        return compared

    setup.loss_fn = poisoned
    StepSetup.compile_update = checked


def respect_permissions() -> None:
    """Takes from root what lets it write to read-only folders."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: of 32 capabilities each
    library = ctypes.CDLL(None)
    library.capget(header, sets)
    sets[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    library.capset(header, sets)


def main() -> None:
    """Runs a command, or one of the processes that `--processes` starts."""
    faults = json.loads(os.environ["FAULTS"])
    log = Log(faults["log"])
    run = next(a for a in sys.argv if a.startswith("--run=")).removeprefix("--run=")
    log_phases(log, faults.get("at_save", (0, "", 0)))
    log_operations(log, str(Path(run).absolute()), *faults.get("kill_at", (None, 0)))
    if faults.get("unprivileged"):
        respect_permissions()
    if "poison" in faults:
        poison(log, *faults["poison"])
    log(phase="command", begin=True)
    if sys.argv[1].isdigit():
        launch._run()
    else:
        launch.__name__ = "tools.faults_child"  # the module that its processes run
        command_line()


if __name__ == "__main__":
    main()
