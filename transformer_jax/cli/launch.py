"""Starts the processes of `--processes N` on this machine, and ends them together."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import IO, NoReturn

from transformer_jax.cli.commands import ProcessOptions, Train
from transformer_jax.cli.main import main
from transformer_jax.errors import UserError
from transformer_jax.training.signals import end_by

Process = subprocess.Popen[bytes]

GRACE = 5
"""Seconds that the processes have to end by themselves after one of them has failed."""


STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Statuses of processes that a signal has stopped, which have reported it."""


def launch(arguments: Sequence[str], options: ProcessOptions) -> None:
    """Runs the command line in several processes, and passes on SIGINT and SIGTERM to all of them;
    a second signal ends them at once. They end with this process, however it ends.

    Process 0 alone reads standard input and prints messages. Whatever else a process writes to
    standard error goes to a file and is shown if the process is the first to fail, since those that
    it leaves behind fail as well. With `--debug`, everything is shown at once. Exits with the
    status of the first process that fails, after one line that names it. UserError: the number of
    processes is not positive, or a coordinator is named as well.
    """
    count = options.processes or 0
    if count < 1:
        raise UserError(f"--processes={count}: must be at least 1")
    if options.coordinator is not None or options.process is not None:
        raise UserError(
            "--processes: starts its own coordinator; leave out --coordinator and --process"
        )
    if isinstance(options, Train):
        for path in chain.from_iterable(re.split("[=,]", argument) for argument in arguments):
            if os.path.lexists(path) and Path(path).is_fifo():
                raise UserError(f"{path}: is a pipe, which only one process can read; name a file")
    command = [*_without_processes(arguments), f"--coordinator=127.0.0.1:{free_port()}"]
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(count)]
        processes: list[Process] = []
        life, alive = os.pipe()  # this process alone holds the end `alive`, until it dies
        stack.callback(os.close, alive)
        stack.callback(os.close, life)
        passed_on = _pass_on_signals(processes)
        try:
            for index, file in enumerate(files):
                log = None if "--debug" in arguments else file
                arguments = [*command, f"--process={index}/{count}"]
                processes.append(_start(arguments, index, log, life))
            index = _first_failure(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if index is not None:
            status = processes[index].returncode
            if status in STOPPED or -status in passed_on:
                sys.exit(status if status > 0 else 128 - status)
            remedy = "; the same command continues the run" if isinstance(options, Train) else ""
            _fail(processes, index, files[index], remedy)


def _fail(processes: Sequence[Process], index: int, log: IO[bytes], remedy: str) -> NoReturn:
    """Says that process `index` has failed, and exits."""
    status = processes[index].returncode
    if status != 2 or processes[0].returncode != 2:  # otherwise process 0 has said why
        log.seek(0)
        sys.stderr.write(log.read().decode(errors="replace"))
    if status != 2:
        what = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"failed: {status}"
        message = f"process {index} of {len(processes)} {what}{remedy}"
        print(f"transformer-jax: error: {message}", file=sys.stderr)
    sys.exit(status if status > 0 else 1)


def _start(arguments: Sequence[str], index: int, log: IO[bytes] | None, life: int) -> Process:
    """Starts process `index`, with `log` as its standard error. It ends when the pipe `life` is
    closed."""
    messages = os.dup(2)  # for those of process 0
    try:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(2 if index else messages), str(life), *arguments],
            stdin=subprocess.DEVNULL if index else None,
            stderr=log,
            pass_fds=[messages, life],
            start_new_session=True,  # otherwise the terminal would send Ctrl-C to it, too
        )
    finally:
        os.close(messages)


def _run() -> None:
    """Runs a command line in a started process. The first arguments are file descriptors: of its
    messages, while tracebacks and what C++ prints go to standard error, and of the pipe that is
    closed when the launcher has died."""
    descriptor, life, *arguments = sys.argv[1:]
    threading.Thread(target=_end_with, args=(int(life),), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_by)
    encoding, errors = sys.stderr.encoding, sys.stderr.errors
    sys.stderr = os.fdopen(int(descriptor), "w", 1, encoding, errors, closefd=False)
    main(arguments)


def _end_with(life: int) -> None:
    """Ends this process when the pipe is closed."""
    os.read(life, 1)
    os._exit(1)


def _pass_on_signals(processes: Sequence[Process]) -> list[int]:
    """Sends SIGINT and SIGTERM to the processes, too; exits at the second one. Returns a list that
    such signals are added to."""
    passed_on: list[int] = []

    def pass_on(number: int, _: object) -> None:
        if passed_on:
            sys.exit(128 + number)  # which kills them, whatever they do
        passed_on.append(number)
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    return passed_on


def _first_failure(processes: Sequence[Process]) -> int | None:
    """Returns the index of the first process that fails, once the others have ended or `GRACE` is
    over; None: none fails."""
    while not any(process.poll() for process in processes):
        if all(process.returncode == 0 for process in processes):
            return None
        time.sleep(0.05)
    index = next(i for i, process in enumerate(processes) if process.returncode)
    end = time.monotonic() + GRACE
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(end - time.monotonic(), 0))
    return index


def _without_processes(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments without `--processes N` or `--processes=N`."""
    pairs = zip(["", *arguments], arguments, strict=False)
    ours = "--processes"
    return [each for before, each in pairs if before != ours and not each.startswith(ours)]


def free_port() -> int:
    """Returns a port of this machine on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


if __name__ == "__main__":
    _run()
