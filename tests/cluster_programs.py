"""Programs that stand in for those of a cluster, so that the scripts of deploy/ run anywhere."""

import sys
from pathlib import Path
from typing import Any

import yaml

from transformer_jax.cli.arguments import parse, split_config
from transformer_jax.cli.commands import Train

ROOT = Path(__file__).parents[1]

FINISHED = "0 step 100: reached train.steps=100; run /shared"
STOPPED = "143 step 60: stopped by SIGTERM; the same command continues from here; run /shared"
FAILED = "1 ValueError: UNKNOWN: Gloo AllGather failed"
BAD_INPUT = "2 transformer-jax: error: model.layers=0: must be above 0"
"""How training ends: its status, and the last line that it prints."""

CLAIM: Any
JOBSET: Any
CLAIM, JOBSET = yaml.safe_load_all((ROOT / "deploy/jobset.yaml").read_text("utf-8"))
"""The objects of the Kubernetes manifest."""


def job_of(jobset: Any) -> Any:
    """Returns what describes the Job of a JobSet."""
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]


def container_of(jobset: Any) -> Any:
    """Returns what describes the container of each pod of a JobSet."""
    return job_of(jobset)["template"]["spec"]["containers"][0]


TRANSFORMER_JAX = """
printf '%s\\n' "$@" > {folder}/arguments
read -r status text < {folder}/endings
sed -i 1d {folder}/endings
echo "$text" >&2
exit "$status"
"""


class Programs:
    """A folder of programs to put first in PATH; `transformer-jax` ends as it is told to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.add("transformer-jax", TRANSFORMER_JAX)

    def add(self, name: str, script: str) -> None:
        """Adds a program in Bash; {folder} is this folder."""
        path = self.folder / name
        path.write_text(
            "#!/usr/bin/env bash\n" + script.replace("{folder}", str(self.folder)), "utf-8"
        )
        path.chmod(0o755)

    def train_for_real(self) -> None:
        """Makes `transformer-jax` the real command."""
        self.add("transformer-jax", f'exec {sys.executable} -m transformer_jax.cli.main "$@"')

    def train_ends(self, *endings: str) -> None:
        """Sets how training ends each time that it is started."""
        (self.folder / "endings").write_text("".join(f"{text}\n" for text in endings), "utf-8")

    def options(self) -> Train:
        """Returns the options of the last training, as the command itself parses them."""
        command, *arguments = (self.folder / "arguments").read_text("utf-8").splitlines()
        assert command == "train"
        config, rest = split_config(arguments)
        config.resolve()
        return parse(Train, rest, "transformer-jax train")
