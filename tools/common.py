"""Comparisons and files that tools and tests share."""

import json
import re
from pathlib import Path

from transformer_jax.config import Config, to_json


def peak_mib(process: int | str = "self") -> float:
    """Returns the peak of the resident memory of a process until now, from /proc."""
    status = Path(f"/proc/{process}/status").read_text("utf-8")
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024


def config_file(config: Config, path: Path) -> Path:
    """Writes a config file, which other processes load. Returns its path."""
    path.write_text(
        "import json\nfrom transformer_jax.config import from_json\n"
        f"get_config = lambda: from_json(json.loads({json.dumps(to_json(config))!r}))\n",
        "utf-8",
    )
    return path
