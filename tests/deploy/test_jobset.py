"""The Kubernetes manifest: valid by the schemas, and its pods end as the policies expect."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from cluster_programs import (
    BAD_INPUT,
    CLAIM,
    FAILED,
    FINISHED,
    JOBSET,
    Programs,
    container_of,
    job_of,
)
from common import ONE_DEVICE, free_port, wait_for

from tools.common import config_file
from transformer_jax.config import Config

VERSION = "1.35"
"""The version of Kubernetes whose schemas are used."""

SCHEMA = yaml.safe_load(Path(__file__).with_name("jobset.schema.yaml").read_text("utf-8"))


def validate(jobset: Any) -> None:
    """Raises if the manifest has an unknown field, lacks one, or has a value of another type."""
    jsonschema.validate(jobset, SCHEMA)
    for each in jobset["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": jobset["metadata"]}
        kubernetes_validate.validate(job | each["template"], VERSION, strict=True)


def test_the_manifest_is_valid() -> None:
    kubernetes_validate.validate(CLAIM, VERSION, strict=True)
    validate(JOBSET)


def test_the_parts_of_the_manifest_agree() -> None:
    job, container = job_of(JOBSET), container_of(JOBSET)
    nodes = next(v["value"] for v in container["env"] if v["name"] == "NODES")
    assert job["completions"] == job["parallelism"] == int(nodes)
    rule = job["podFailurePolicy"]["rules"][0]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # as podFailurePolicy demands
    names = [volume["name"] for volume in pod["volumes"]]
    assert [mount["name"] for mount in container["volumeMounts"]] == names
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    first = JOBSET["spec"]["replicatedJobs"][0]["name"]
    assert JOBSET["spec"]["coordinator"]["replicatedJob"] == first


def start_pod(
    index: int, changes: dict[str, str], coordinator: str = "train-workers-0-0.train"
) -> subprocess.Popen[bytes]:
    """Starts what the container of a pod runs, with `changes` to its text."""
    container = container_of(JOBSET)
    command = [*container["command"], *container["args"]]
    for old, new in changes.items():
        command = [part.replace(old, new) for part in command]
    pod = {"COORDINATOR": coordinator, "NODES": "2", "JOB_COMPLETION_INDEX": str(index)}
    return subprocess.Popen(command, env=os.environ | ONE_DEVICE | pod)


@pytest.mark.parametrize(("ending", "status"), [(FINISHED, 0), (FAILED, 1), (BAD_INPUT, 2)])
def test_a_pod_ends_as_training_ends(ending: str, status: int, programs: Programs) -> None:
    programs.train_ends(ending)
    assert start_pod(1, {"/shared/config.py": "configs/base.py"}).wait(20) == status
    options = programs.options()
    assert (options.coordinator, options.process) == ("train-workers-0-0.train:1234", "1/2")
    assert options.run == "/shared/runs/base"


@pytest.mark.slow
def test_two_pods_stop_together_and_finish(
    tiny_config: Config, programs: Programs, tmp_path: Path
) -> None:
    """With the real command. Both fail, so that the Job does."""
    programs.train_for_real()
    config = config_file(tiny_config, tmp_path / "config.py")
    port = f":{free_port()}"
    changes = {"/shared/config.py": str(config), "/shared": str(tmp_path), ":1234": port}

    def start(steps: int) -> list[subprocess.Popen[bytes]]:
        more = changes | {"train --": f"train --config.train.steps={steps} --"}
        return [start_pod(index, more, "127.0.0.1") for index in range(2)]

    pods = start(2000)
    wait_for(tmp_path / "runs/base/checkpoints/00000012", pods[0])
    pods[1].send_signal(signal.SIGTERM)
    assert [pod.wait(200) for pod in pods] == [128 + signal.SIGTERM] * 2
    assert [pod.wait(200) for pod in start(20)] == [0, 0]
