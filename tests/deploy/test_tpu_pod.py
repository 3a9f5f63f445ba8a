"""The TPU pod's script, with a `gcloud` that keeps one pod of one worker."""

import fcntl
import os
import subprocess

import pytest
from cluster_programs import BAD_INPUT, FAILED, FINISHED, ROOT, STOPPED, Programs

GCLOUD = """
shift 2
echo "$1 $2" >> {folder}/calls
state={folder}/state
case "$1 $2" in
  "queued-resources describe")
    [ -e $state ] || { echo "ERROR: NOT_FOUND: Resource was not found" >&2; exit 1; }
    cat $state
    [ "$(cat $state)" != PROVISIONING ] || echo ACTIVE > $state ;;
  "queued-resources create") echo "${*:4}" > {folder}/create; echo PROVISIONING > $state ;;
  "queued-resources delete") [ "$4" = --force ] && rm $state ;;
  "tpu-vm scp") mkdir -p {folder}/worker && cp "$3" {folder}/worker ;;
  "tpu-vm ssh")
    for option; do [[ $option == --command=* ]] && command=${option#*=}; done
    cd {folder}/worker
    bash -c "$command"
    status=$?
    [ $status -ne 255 ] || echo SUSPENDED > $state
    exit $status ;;
esac
"""

PYTHON = """
mkdir -p .venv/bin
ln -sf {folder}/transformer-jax .venv/bin
ln -sf "$(type -P true)" .venv/bin/pip
"""

PREEMPTED = "255 Connection to 10.0.0.7 closed by remote host."
OTHER_WORKER = "134 ##### Command execution on worker 3 failed with exit status 2. Continuing."

CREATE = ["queued-resources describe", "queued-resources create"]
CREATE += ["queued-resources describe"] * 2  # it is provisioned, then active
TRAIN = ["tpu-vm scp", "tpu-vm ssh"]
AGAIN = ["queued-resources describe", *TRAIN]
REPLACE = ["queued-resources describe", "queued-resources delete", *CREATE]
DELETE = ["queued-resources delete"]


@pytest.mark.parametrize(
    ("endings", "status", "calls"),
    [
        ([FINISHED], 0, [*CREATE, *TRAIN, *DELETE]),
        ([STOPPED, FINISHED], 0, [*CREATE, *TRAIN, *AGAIN, *DELETE]),
        ([FAILED, FINISHED], 0, [*CREATE, *TRAIN, *AGAIN, *DELETE]),
        ([PREEMPTED, FINISHED], 0, [*CREATE, *TRAIN, *REPLACE, *TRAIN, *DELETE]),
        ([BAD_INPUT], 2, [*CREATE, *TRAIN]),
        ([OTHER_WORKER], 2, [*CREATE, *TRAIN]),
        ([FAILED, FAILED, FINISHED], 1, [*CREATE, *TRAIN, *AGAIN]),
    ],
)
def test_the_pod_trains_until_training_has_finished(
    endings: list[str], status: int, calls: list[str], programs: Programs
) -> None:
    programs.train_ends(*endings)
    assert start(programs).wait(60) == status
    assert (programs.folder / "calls").read_text("utf-8").splitlines() == calls
    created = (programs.folder / "create").read_text("utf-8")
    wanted = "--node-id=my-pod --accelerator-type=v6e-16 --spot --zone=us-east5-a "
    assert created.startswith(wanted)
    worker = programs.folder / "worker"
    assert (worker / "mounted").exists()
    assert (worker / "source/pyproject.toml").exists()
    parsed = programs.options()
    assert (parsed.coordinator, parsed.run) == ("auto", "/shared/my runs/base")


def test_training_waits_for_an_earlier_command(programs: Programs) -> None:
    """The connection to the worker was lost, and there the last training is still running."""
    programs.train_ends(FINISHED)
    (programs.folder / "worker").mkdir()
    with (programs.folder / "worker/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        script = start(programs)
        with pytest.raises(subprocess.TimeoutExpired):
            script.wait(1.5)
        assert "tpu-vm ssh" in (programs.folder / "calls").read_text("utf-8")
        assert not (programs.folder / "arguments").exists()
    assert script.wait(60) == 0


def start(programs: Programs) -> subprocess.Popen[bytes]:
    """Starts the script, with programs in place of those that it and the worker call."""
    for name, script in {"gcloud": GCLOUD, "python3.11": PYTHON, "sudo": ""}.items():
        programs.add(name, script)
    settings = {
        "TPU": "my-pod",
        "ZONE": "us-east5-a",
        "CREATE": "--accelerator-type=v6e-16 --spot",
        "SETUP": "touch mounted",
        "PAUSE": "0",
        "MAX_RESTARTS": "1",
    }
    options = ["--config=configs/base.py", "--run=/shared/my runs/base"]
    return subprocess.Popen([ROOT / "deploy/tpu_pod.sh", *options], env=os.environ | settings)
