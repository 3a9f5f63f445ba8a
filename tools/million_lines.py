"""Sends a million lines through `translate` and writes results/million_lines.json.

    python -m tools.million_lines --run runs/quickstart

The lines are those of the built-in corpus, again and again, through pipes. Its memory is read from
/proc while it translates.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from transformer_jax.benchmark import results
from transformer_jax.text.corpus import Corpus

LINES = 1_000_000
LOOKS = (10_000, 100_000, LINES)
"""Numbers of translated lines after which the peak memory is read."""


def translate(run: Path, lines: int, looks: tuple[int, ...]) -> dict[str, Any]:
    """Returns the number of lines that come out, the seconds, and the peak memory in MiB after
    each number of lines."""
    command = (sys.executable, "-m", "transformer_jax.cli.main", "translate", f"--run={run}")
    began, peaks, count = time.monotonic(), dict[str, float](), 0
    with subprocess.Popen(
        (*command, "--beam=1"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        threading.Thread(target=_write, args=(process.stdin, lines), daemon=True).start()
        for _ in process.stdout:
            count += 1
            if count in looks:
                peaks[str(count)] = _peak_mib(process.pid)
    if process.returncode:
        raise RuntimeError(f"translate ended with status {process.returncode}")
    seconds = time.monotonic() - began
    return {"lines": lines, "translated": count, "seconds": seconds, "peak_mib": peaks}


def _write(file: IO[str], count: int) -> None:
    """Writes lines to a pipe, as fast as they are read."""
    sources = [source for source, _ in Corpus("grammar:test").pairs()]
    with file:
        file.writelines(f"{line}\n" for line in itertools.islice(itertools.cycle(sources), count))


def _peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return int(kib) / 1024


def main() -> None:
    """Reads --run and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    found = translate(parser.parse_args().run, LINES, LOOKS)
    print(results.write("million_lines", "make million-lines", found))


if __name__ == "__main__":
    main()
