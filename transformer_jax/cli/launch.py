"""Starts the processes of `--processes N` on this machine, and ends them together."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from transformer_jax.cli.commands import ProcessOptions
from transformer_jax.errors import UserError

GRACE = 50
"""Seconds that the processes have to end by themselves after one of them has failed."""


def launch(arguments: Sequence[str], options: ProcessOptions) -> None:
    """Runs the command line in several processes, and passes on SIGINT and SIGTERM to all of them.

    Exits with the status of the first process that fails, after one line that names it. UserError:
    the number of processes is not positive, or a coordinator is named as well.
    """
    count = options.processes or 0
    if count < 1:
        raise UserError(f"--processes={count}: must be at least 1")
    if options.coordinator is not None or options.process is not None:
        raise UserError(
            "--processes: starts its own coordinator; leave out --coordinator and --process"
        )
    command = [sys.executable, "-m", "transformer_jax.cli.main", *_without_processes(arguments)]
    command.append(f"--coordinator=127.0.0.1:{_free_port()}")
    processes = [
        # A session of its own: otherwise the terminal would send Ctrl-C to it, too.
        subprocess.Popen([*command, f"--process={index}/{count}"], start_new_session=True)
        for index in range(count)
    ]

    def forward(number: int, _: object) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    try:
        _wait(processes)
    finally:
        for process in processes:
            process.kill()


def _wait(processes: Sequence[subprocess.Popen]) -> None:
    """Waits for all processes. Exits after a failure, once the others have ended or `GRACE` is
    over."""
    while all(process.returncode in (None, 0) for process in processes):
        if all(process.returncode == 0 for process in processes):
            return
        time.sleep(0.1)
        for process in processes:
            process.poll()
    index = next(i for i, process in enumerate(processes) if process.returncode)
    status = processes[index].returncode
    end = time.monotonic() + GRACE
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(end - time.monotonic(), 0))
    if status != 2:  # after which it has said why
        what = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"failed: {status}"
        print(
            f"transformer-jax: error: process {index} of {len(processes)} {what}; the same command "
            "continues the run",
            file=sys.stderr,
        )
    sys.exit(status if status > 0 else 1)


def _without_processes(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments without `--processes N` or `--processes=N`."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and not argument.startswith("--processes"):
            kept.append(argument)
        skip = argument == "--processes"
    return kept


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
