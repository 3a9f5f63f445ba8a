"""Comparisons, commands and files that tools and tests share."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from transformer_jax.benchmark.timing import Samples
from transformer_jax.config import Config, to_json

CLI = (sys.executable, "-m", "transformer_jax.cli.main")


def run_command(*arguments: str, text: str = "", **environment: str) -> tuple[str, float]:
    """Runs a command of `transformer-jax` as users do, with changes of the environment. Returns
    what it prints, and the seconds that it takes."""
    users = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    words, began = [*CLI, *arguments], time.perf_counter()
    shown = subprocess.check_output(words, input=text, env=users | environment, text=True)
    return shown, time.perf_counter() - began


def memory_mib(field: str, process: int | str = "self") -> float:
    """Returns the memory of a process by the name of a field of /proc/PROCESS/status."""
    status = Path(f"/proc/{process}/status").read_text("utf-8")
    return int(re.findall(rf"{field}:\s+(\d+) kB", status)[0]) / 1024


def spread(samples: Samples) -> dict[str, float]:
    """Returns the median and the quartiles."""
    low, high = samples.quartiles
    return {"median": samples.median, "low": low, "high": high}


def config_file(config: Config, path: Path) -> Path:
    """Writes a config file, which other processes load. Returns its path."""
    path.write_text(
        "import json\nfrom transformer_jax.config import from_json\n"
        f"get_config = lambda: from_json(json.loads({json.dumps(to_json(config))!r}))\n",
        "utf-8",
    )
    return path
