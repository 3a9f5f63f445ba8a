"""Two processes with two devices each, over local sockets."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from common import Patch, changed, free_port, on_devices, translations, wait_for
from object_store import Bucket
from training_process import of_kind

from tools.common import config_file
from tools.processes import children
from transformer_jax.cli.launch import _without_processes
from transformer_jax.config import Config
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.files import AnyPath, find_path
from transformer_jax.runs import checkpoint, lock, run
from transformer_jax.runs.run import Run
from transformer_jax.training import setup
from transformer_jax.training.setup import prepare
from transformer_jax.training.trainer import train
from transformer_jax.training.validation import evaluate

ENVIRONMENT = {"JAX_PLATFORMS": "cpu", **on_devices(2)}


COMMAND = "from transformer_jax.cli.main import main; main()"
ERROR = "transformer-jax: error: "


def begin(*command: str, program: str = COMMAND, **changes: str) -> subprocess.Popen[str]:
    """Starts a command; `changes` are those of the environment."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *command],
        env=os.environ | ENVIRONMENT | changes,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start(
    config: Path, folder: AnyPath, *options: str, program: str = COMMAND
) -> subprocess.Popen[str]:
    """Starts training."""
    return begin("train", f"--config={config}", f"--run={folder}", *options, program=program)


def end(process: subprocess.Popen[str], status: int) -> str:
    """Waits for the end of a process and returns what it has printed on standard error."""
    out, error = process.communicate(timeout=200)
    assert process.returncode == status, error
    assert out == ""
    return error


def samples(made: Run) -> list[Any]:
    return [record["samples"] for record in of_kind(made, "evaluation")]


def losses(made: Run) -> list[float]:
    return [record["loss"] for record in of_kind(made, "train")]


@pytest.mark.long
def test_two_processes_train_as_one_and_stop_together(
    tiny_config: Config, finished: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    endless = changed(tiny_config, train={"steps": 2000})
    config = config_file(endless, tmp_path / "config.py")
    training = start(config, folder, "--processes=2")
    wait_for(folder / "checkpoints/00000012", training)
    training.send_signal(signal.SIGTERM)
    error = end(training, 143)
    assert error.count("stopped by SIGTERM") == 1  # only the coordinator reports
    assert "error" not in error
    made = run.load(folder)
    last = checkpoint.steps(made.checkpoints)[-1]
    assert f"step {last}: stopped" in error
    np.testing.assert_allclose(losses(made)[:6], losses(finished), rtol=1e-5)
    assert samples(made)[:2] == samples(finished)


def places() -> list[list[str]]:
    """The options with which two processes find each other."""
    join = f"--coordinator=127.0.0.1:{free_port()}"
    return [[join, f"--process={index}/2"] for index in range(2)]


@pytest.mark.slow
def test_a_run_that_is_not_shared_is_refused(tiny_config: Config, tmp_path: Path) -> None:
    config = config_file(tiny_config, tmp_path / "config.py")
    impatient = "from transformer_jax.training import trainer; trainer.APPEARS_WITHIN = 1; "
    both = [
        start(config, tmp_path / f"run{i}", *place, program=impatient + COMMAND)
        for i, place in enumerate(places())
    ]
    said = "must be on storage that all processes share\n"
    for i, process in enumerate(both):
        assert end(process, 2) == f"{ERROR}run {tmp_path}/run{i}: {said}"


@pytest.mark.long
def test_a_process_with_other_files_is_refused_by_name(
    tiny_config: Config, finished: Run, fixtures: Path, tmp_path: Path
) -> None:
    """With another corpus and tokenizer of the same name, and without the run's checkpoints."""
    data = {"train": ("pairs.tsv",), "dev": ()}
    own = changed(tiny_config, data=data, tokenizer={"models": ("own.model",)})
    config = config_file(own, tmp_path / "config.py")
    both, models = [], (finished.folder, fixtures / "run")
    for i, (model, place) in enumerate(zip(models, places(), strict=True)):
        (tmp_path / f"{i}").mkdir()
        shutil.copy(model / "tokenizer.model", tmp_path / f"{i}" / "own.model")
        (tmp_path / f"{i}" / "pairs.tsv").write_text(f"red old\talt rot {i}\n" * 100)
        there = f"import os; os.chdir({str(tmp_path / str(i))!r}); "
        both.append(start(config, Path("run"), *place, program=there + COMMAND))
    end(both[0], 2)
    what = f"{ERROR}process 1 has another config or data than process 0 "
    files = r"\(pairs.tsv: \w{12} -> \w{12}; own.model: \w{12} -> \w{12}\)\n"
    assert re.fullmatch(re.escape(what) + files, end(both[1], 2))
    shutil.copytree(finished.folder, tmp_path / "0" / "run")
    config, (first, second) = config_file(tiny_config, config), places()
    one = start(config, tmp_path / "0" / "run", *first)
    other = start(config, tmp_path / "1" / "run", *second)
    assert end(other, 2) == what + "(checkpoints of the run: 6, 8, 12 -> none)\n"
    end(one, 2)


@pytest.mark.slow
def test_the_rows_of_a_process_need_not_follow_each_other(
    tiny_config: Config, finished: Run, tmp_path: Path
) -> None:
    """As on TPU slices of several hosts, whose devices are neighbors of those of other hosts."""
    program = """if True:
        import numpy as np
        from transformer_jax.parallel.mesh import mesh_utils
        mesh_utils.create_device_mesh = lambda shape, devices, **_: np.reshape(
            [devices[i] for i in (0, 2, 3, 1)], shape
        )
    """
    config = config_file(tiny_config, tmp_path / "config.py")
    command = program + "    " + COMMAND
    for process in [start(config, tmp_path / "run", *each, program=command) for each in places()]:
        end(process, 0)
    made = run.load(tmp_path / "run")
    np.testing.assert_allclose(losses(made), losses(finished), rtol=1e-5)
    assert samples(made) == samples(finished)


def test_a_port_that_is_in_use_is_named(tiny_config: Config, tmp_path: Path) -> None:
    config = config_file(tiny_config, tmp_path / "config.py")
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        address = f"127.0.0.1:{used.getsockname()[1]}"
        one = start(config, tmp_path / "run", f"--coordinator={address}", "--process=0/2")
        said = f"--coordinator={address}: Address already in use; name a free port\n"
        assert end(one, 2) == ERROR + said


@pytest.mark.long
def test_processes_that_do_not_come_are_told(
    tiny_config: Config, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Given an address, JAX does not look for it in the environment, of which it would warn."""
    config = config_file(tiny_config, tmp_path / "config.py")
    address = f"127.0.0.1:{free_port()}"
    impatient = "from transformer_jax.parallel import processes; processes.JOIN_TIMEOUT = 3; "
    options = [f"--coordinator={address}", "--process=1/2"]
    with monkeypatch.context() as pod:
        pod.setitem(ENVIRONMENT, "KUBERNETES_SERVICE_HOST", "10.0.0.1")
        waiting = start(config, tmp_path / "run", *options, program=impatient + COMMAND)
    said = f"--coordinator={address}: waited 3 seconds there for the coordinator\n"
    assert end(waiting, 2) == ERROR + said
    error = end(start(config, tmp_path / "run", "--coordinator=auto"), 2)
    assert error.startswith(f"{ERROR}--coordinator=auto: coordinator_address should")
    assert error.endswith("; give --coordinator=HOST:PORT\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_two_processes_translate_as_one(fixtures: Path) -> None:
    """Each sentence once, in order. Process 0 alone reads, writes and warns."""
    sources, wanted, _ = zip(*translations(fixtures)[:4], strict=True)
    lines = [*sources, "", "red " * 40]
    command = ["translate", f"--run={fixtures / 'run'}", "--beam=1", "--processes=2", "--truncate"]
    translating = begin(*command)
    out, error = translating.communicate("".join(f"{line}\n" for line in lines), timeout=200)
    assert translating.returncode == 0, error
    *found, cut, end = out.split("\n")
    assert found == [*wanted, ""]
    assert cut != end == ""
    assert error.count("WARNING: line 6: cut from") == len(error.splitlines()) == 1


@pytest.mark.long
@pytest.mark.parametrize("option", ["--input=gone.txt", "--output=/gone/x"])
def test_an_error_of_the_coordinator_is_said_once_and_ends_all(option: str, fixtures: Path) -> None:
    began = time.monotonic()
    command = ["translate", f"--run={fixtures / 'run'}", option]
    one, other = (begin(*command, *place) for place in places())
    error = end(one, 2)
    assert error.startswith(ERROR)
    assert "gone" in error
    assert end(other, 2) == error
    assert time.monotonic() < began + 30  # nobody has waited for a timeout


@pytest.mark.long
def test_two_processes_evaluate_as_one(fixtures: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    corpus = str(tmp_path / "corpus.tsv")
    text = "".join(f"{source}\t{best}\n" for source, _, best in translations(fixtures)[1:])
    Path(corpus).write_text(text + "old\tneu\n", "utf-8")
    [wanted] = evaluate(Translator.load(fixtures / "run"), [corpus])
    options = [f"--run={fixtures / 'run'}", f"--data={corpus}", "--json", "--mesh", "fsdp=2"]
    cache = str(tmp_path / "other")
    evaluating = begin("evaluate", *options, "--processes=2", XDG_CACHE_HOME=cache)
    out, error = evaluating.communicate(timeout=200)
    assert (evaluating.returncode, error) == (0, "")
    found = json.loads(out)
    assert found["loss"] == pytest.approx(wanted.scores["loss"], rel=1e-5)
    same = ("bleu", "chrf", "exact", "signatures")
    assert [found[name] for name in same] == [wanted.scores[name] for name in same]


@pytest.mark.slow
def test_a_process_that_fails_alone_does_not_wait_for_the_others(fixtures: Path) -> None:
    """JAX would let it wait for five minutes."""
    command, (first, second) = ["translate", f"--run={fixtures / 'run'}"], places()
    other = begin(*command, *second, "--beam=0")
    one = begin(*command, *first)
    began = time.monotonic()
    assert end(other, 2) == f"{ERROR}decode.beam=0: must be above 0\n"
    one.communicate(timeout=200)
    assert one.returncode not in (0, None)
    assert time.monotonic() < began + 90


@pytest.mark.slow
def test_processes_without_a_shared_disk_share_a_bucket(
    tiny_config: Config, tmp_path: Path, bucket: Bucket
) -> None:
    """Each of two processes saves its parts of the arrays, with which one process continues."""
    folder = find_path("gs://bucket/runs/shared")
    wide = changed(tiny_config, model={"d_ff": 2048})
    short = changed(wide, train={"steps": 8})
    training = []
    for index, place in enumerate(places()):
        cache = str(tmp_path / f"cache{index}")
        each = changed(short, data={"cache": cache})
        prepare(each)  # as `inspect` does
        config = config_file(each, tmp_path / f"config{index}.py")
        training.append(start(config, folder, "--config.mesh.fsdp=4", *place))
    for process in training:
        end(process, 0)
    for index in (0, 1):
        assert any(f"/weights/ocdbt.process_{index}/d/" in name for name in bucket.objects)
    made = train(wide, folder)
    assert checkpoint.steps(made.checkpoints)[-1] == 12
    np.testing.assert_allclose(losses(made), losses(train(wide, tmp_path / "whole")), rtol=1e-5)
    one = changed(wide, train={"steps": 1})
    other = train(one, tmp_path / "other", init_from=folder)
    ours, theirs = (jax.tree.leaves(r.params()) for r in (other, made))
    assert max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)) < 0.01


@pytest.mark.slow
def test_the_death_of_a_process_ends_all(tiny_config: Config, tmp_path: Path) -> None:
    """tests/tools/test_faults.py continues such a run, to the same bits."""
    folder = tmp_path / "run"
    endless = changed(tiny_config, train={"steps": 2000})
    training = start(config_file(endless, tmp_path / "a.py"), folder, "--processes=2")
    wait_for(folder / "checkpoints/00000004", training)
    os.kill(children(training)[1], signal.SIGKILL)
    began = time.monotonic()
    error = end(training, 1)
    assert time.monotonic() < began + 20
    said = "process 1 of 2 was ended by SIGKILL; the same command continues the run"
    assert error.splitlines()[-1] == ERROR + said
    assert error.count("error") == 1  # nothing of what the other process says of it


@pytest.mark.slow
def test_a_process_that_stops_for_a_minute_is_waited_for(
    tiny_config: Config, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    config = changed(tiny_config, train={"steps": 100})
    training = start(config_file(config, tmp_path / "config.py"), folder, "--processes=2")
    wait_for(folder / "checkpoints/00000004", training)
    stopped = children(training)[1]
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(60)
    os.kill(stopped, signal.SIGCONT)
    end(training, 0)
    assert (folder / "checkpoints/00000100").exists()


@pytest.mark.long
def test_processes_end_with_their_launcher(tiny_config: Config, tmp_path: Path) -> None:
    """Otherwise they would hold the lock of the run, and the same command would be refused."""
    folder = tmp_path / "run"
    endless = changed(tiny_config, train={"steps": 100_000})
    config = config_file(endless, tmp_path / "config.py")
    training = start(config, folder, "--processes=2")
    wait_for(folder / "checkpoints/00000004", training)
    both = children(training)
    training.kill()
    training.communicate(timeout=20)
    end = time.monotonic() + 20
    while any(map(is_running, both)):
        assert time.monotonic() < end
        time.sleep(0.1)
    with lock.locked(folder):
        pass


def is_running(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_the_others_notice_a_death_without_a_launcher(
    killed: int, tiny_config: Config, tmp_path: Path
) -> None:
    """As on several machines, by the heartbeat, for which a process may stand still a minute."""
    folder = tmp_path / "run"
    endless = changed(tiny_config, train={"steps": 100_000})
    config = config_file(endless, tmp_path / "config.py")
    both = [start(config, folder, *place) for place in places()]
    wait_for(folder / "checkpoints/00000004", both[killed])
    both[killed].kill()
    began = time.monotonic()
    other = both[1 - killed]
    other.communicate(timeout=250)
    assert time.monotonic() < began + 180
    assert other.returncode not in (0, 2)
    both[killed].communicate()


@pytest.mark.slow
def test_processes_end_together_after_the_minutes(tiny_config: Config, tmp_path: Path) -> None:
    limits = {"steps": 100_000, "minutes": 0.05}
    config = config_file(changed(tiny_config, train=limits), tmp_path / "config.py")
    error = end(start(config, tmp_path / "run", "--processes=2"), 0)
    last = checkpoint.steps(run.load(tmp_path / "run").checkpoints)[-1]
    assert f"step {last}: reached train.minutes=0.05" in error


def test_pmap_runs_in_one_process(tiny_config: Config, monkeypatch: Patch) -> None:
    monkeypatch.setattr(setup, "this_process", lambda: (0, 2))
    pmap = changed(tiny_config, execution={"executor": "pmap"})
    with pytest.raises(UserError, match=r"executor='pmap': runs in one process; use exec"):
        setup.check_config(pmap)
    setup.check_config(tiny_config)


def test_children_are_given_the_other_arguments() -> None:
    arguments = ["train", "--processes", "2", "--run=r", "--new", "--processes=3"]
    assert _without_processes(arguments) == ["train", "--run=r", "--new"]
