"""The Slurm script, with programs that print and end as Slurm's do."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from cluster_programs import BAD_INPUT, FAILED, FINISHED, ROOT, STOPPED, Programs
from common import ONE_DEVICE, wait_for

from tools.common import config_file
from transformer_jax.config import Config

SCRIPT = ROOT / "deploy/slurm.sh"

SRUN = """
while [[ $1 == --* ]]; do shift; done
"$@"
status=$?
[ "$status" -eq 0 ] && exit
echo "srun: error: node1: task 0: Exited with exit code $status" >&2
echo "srun: launch/slurm: _step_signal: Terminating StepId=7.0" >&2
echo "srun: error: node2: task 1: Terminated" >&2
exit 143
"""
"""With two tasks and --kill-on-bad-exit, of which one fails by itself."""


def run_job(programs: Programs, **environment: str) -> tuple[int, bool]:
    """Runs the batch script; returns its status, and whether it has queued the job again."""
    programs.add("srun", SRUN)
    programs.add("scontrol", '[ "$*" = "requeue 7" ] && touch {folder}/queued')
    done = subprocess.run(
        [SCRIPT, "--config=configs/base.py", "--run=/shared/runs/base", "--config.model.layers=4"],
        env=os.environ | {"SLURM_JOB_ID": "7"} | environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, (programs.folder / "queued").exists()


@pytest.mark.parametrize(
    ("ending", "restarts", "status", "queued"),
    [
        (FINISHED, 0, 0, False),
        (STOPPED, 0, 0, True),
        (STOPPED, 99, 0, True),
        (FAILED, 19, 0, True),
        (FAILED, 20, 143, False),
        (BAD_INPUT, 0, 2, False),
        ("0     source  step 1: stopped by the police", 0, 0, False),
    ],
)
def test_the_job_is_queued_again_until_training_has_finished(
    ending: str, restarts: int, status: int, queued: bool, programs: Programs
) -> None:
    programs.train_ends(ending)
    assert run_job(programs, SLURM_RESTART_COUNT=str(restarts)) == (status, queued)
    options = programs.options()
    assert options.coordinator == "auto"
    assert options.run == "/shared/runs/base"


def test_the_command_may_run_in_a_container(programs: Programs) -> None:
    programs.train_ends(FINISHED)
    programs.add("apptainer", 'echo "$*" > {folder}/container; shift 3; exec "$@"')
    assert run_job(programs, CONTAINER="apptainer exec --nv image.sif") == (0, False)
    shown = (programs.folder / "container").read_text("utf-8")
    assert shown.startswith("exec --nv image.sif transformer-jax train --coordinator=auto ")


def test_slurm_is_asked_for_what_the_script_relies_on() -> None:
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", SCRIPT.read_text("utf-8"), re.M))
    assert "requeue" in asked
    assert re.fullmatch(r"TERM@\d+", asked["signal"])  # B:TERM would be sent to the script alone
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]


TWO_TASKS = """
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & echo "$!" > {folder}/pid
wait -n && wait -n
"""


@pytest.mark.slow
def test_two_tasks_stop_and_finish_as_the_script_expects(
    tiny_config: Config, programs: Programs, tmp_path: Path
) -> None:
    """With the real command, which finds its coordinator as under Slurm."""
    programs.add("srun", TWO_TASKS)
    programs.add("scontrol", "touch {folder}/queued")
    programs.train_for_real()
    config = config_file(tiny_config, tmp_path / "config.py")
    run, queued = tmp_path / "run", programs.folder / "queued"

    def start(steps: int) -> subprocess.Popen[bytes]:
        options = [f"--config={config}", f"--run={run}", f"--config.train.steps={steps}"]
        job = {"SLURM_JOB_ID": "7"}
        return subprocess.Popen([SCRIPT, *options], env=os.environ | ONE_DEVICE | job)

    job = start(2000)
    wait_for(run / "checkpoints/00000012", job)
    os.kill(int((programs.folder / "pid").read_text()), signal.SIGTERM)
    assert job.wait(200) == 0
    assert queued.exists()
    queued.unlink()
    assert start(20).wait(200) == 0
    assert not queued.exists()
