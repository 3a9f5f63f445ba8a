"""What is wrong in a command line, a run or a file is said in one line that is safe to print."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from common import error_line
from object_store import Bucket

from transformer_jax.cli.main import main
from transformer_jax.runs import checkpoint
from transformer_jax.runs.run import Run

QUICKSTART = f"--config={Path('configs/quickstart.py').resolve()}"

RED = "\x1b[31mred\x9b0m"
"""A sentence with control characters that begin escape sequences in a terminal."""


@pytest.fixture
def copied(finished: Run, tmp_path: Path) -> Path:
    """A copy of `finished` that a test may change."""
    return Path(shutil.copytree(finished.folder, tmp_path / "copied"))


def edit_config(folder: Path, change: Callable[[Any], Any]) -> str:
    """Changes the run's stored config. Returns the text of config.json, which has no digest."""
    path = folder / "config.json"
    stored = json.loads(path.read_text("utf-8"))
    del stored["sha256"]
    change(stored["config"])
    path.write_text(json.dumps(stored), "utf-8")
    return path.read_text("utf-8")


@pytest.fixture
def nothing_written(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Makes an empty folder the current one. In the end it is empty, and the bucket as before."""
    monkeypatch.chdir(tmp_path)
    objects = dict(bucket.objects)
    yield
    assert not list(tmp_path.iterdir())
    assert bucket.objects == objects


DEEP = "[" * 100_000 + "]" * 100_000
LONG = "9" * 5000


@pytest.mark.parametrize("text", [DEEP, LONG])
@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
def test_json_that_cannot_be_parsed_is_error_line(
    text: str, name: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "config.json":
        stored = edit_config(copied, lambda config: config.update(here="HERE"))
        (copied / name).write_text(stored.replace('"HERE"', text))
    else:
        for folder in (copied / "checkpoints").iterdir():
            (folder / name).write_text(text)
    error = error_line(["translate", f"--run={copied}", "--input=/dev/null"], capsys)
    assert f"{name}" in error
    assert "is damaged: not JSON that can be read" in error


@pytest.mark.parametrize("names", [("-", "-"), ("/dev/stdin", "-"), ("/dev/fd/63", "/dev/fd/63")])
@pytest.mark.parametrize("option", ["--prefix", "--phrases"])
def test_a_pipe_is_not_shared_by_two_inputs(
    names: tuple[str, str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["translate", "--run=r", f"--input={names[0]}", f"{option}={names[1]}"]
    assert f"{names[1]}: is read once, but named 2 times" in error_line(command, capsys)


def test_control_characters_of_a_config_key_are_escaped(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_config(copied, lambda config: config.update({RED: {}}))
    error = error_line(["translate", f"--run={copied}"], capsys)
    assert r"\x1b[31mred\x9b0m: unknown key" in error
    assert "\x1b" not in error
    assert "\x9b" not in error


def test_control_characters_of_shown_sentences_are_escaped(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "dev.tsv"
    corpus.write_text(f"red {RED}\trot {RED}\n", "utf-8")
    main(["evaluate", f"--run={finished.folder}", f"--data={corpus}", "--show=1"])
    shown = capsys.readouterr().out
    assert r"source     red \x1b[31mred\x9b0m" in shown
    assert r"reference  rot \x1b[31mred\x9b0m" in shown
    assert not {"\x1b", "\x9b"} & set(shown)


def test_an_old_best_checkpoint_is_not_averaged(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run keeps two checkpoints, and the best one although it is old."""
    edit_config(copied, lambda config: config["train"].update(keep=2))
    steps = checkpoint.steps(copied / "checkpoints")
    command = ["average", f"--run={copied}", f"--out={tmp_path / 'out'}"]
    error = error_line([*command, "--last=3"], capsys)
    assert f"2 newest checkpoints ({steps[-2]}, {steps[-1]})" in error
    main(command)
    assert f"average of steps {steps[-2]}, {steps[-1]}" in capsys.readouterr().out


def test_a_stored_kernel_is_never_replaced_without_a_word(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = edit_config(
        copied, lambda config: config["execution"].update(kernel="own_kernels:fast")
    )
    error = error_line(["train", f"--run={copied}"], capsys)
    assert "execution.kernel='own_kernels:fast'" in error
    assert "--config.execution.kernel=own_kernels:fast" in error
    assert "--config.execution.kernel=auto" in error
    assert (copied / "config.json").read_text("utf-8") == stored
    main(["translate", f"--run={copied}", "--input=/dev/null"])
    main(["train", f"--run={copied}", "--config.execution.kernel", "reference"])


@pytest.mark.long
def test_the_cache_folder_of_another_machine_is_not_used(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    edit_config(copied, lambda config: config["data"].update(cache=elsewhere))
    main(["evaluate", f"--run={copied}", "--beam=1"])
    main(["inspect", f"--run={copied}"])
    assert "loss" in capsys.readouterr().out
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("arguments", ["--config a.py --config.model.layers=4 -h", "-h --config=a"])
def test_help_is_help_beside_any_config(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", *arguments.split()])
    assert not stop.value.code
    assert "--run" in capsys.readouterr().out


def test_config_without_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--config", "--run=r"], ["--run=r", "--config"]):
        error = error_line(["train", *arguments], capsys)
        assert "--config: needs the path of a config file" in error


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--config.mesh.fsdp=3", "the nearest that fits is mesh.data=2 mesh.fsdp=4 mesh.tensor=1"),
        ("--config.mesh.data=3", "mesh.tensor=1: needs 3 devices, not 8; the nearest that"),
        ("--config.mesh.data=0", "mesh.data=0: must be above 0, or -1"),
        ("--config.mesh.pipeline=2", "--config.mesh.pipeline=2; known: data, fsdp, tensor"),
        ("--config.mesh.tensor=8", "mesh.tensor=8: must divide model.heads=4"),
    ],
)
def test_a_mesh_that_does_not_fit_writes_nothing(
    option: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    training = ["train", "--config=configs/quickstart.py", f"--run={folder}", option]
    assert message in error_line(training, capsys)
    assert not folder.exists()


@pytest.mark.long
def test_a_run_translates_on_another_mesh(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "lines.en"
    lines.write_text("red green\nold\n", "utf-8")
    outputs = []
    for mesh in ([], ["--mesh", "data=2", "fsdp=2", "tensor=2"]):
        main(["translate", f"--run={finished.folder}", f"--input={lines}", *mesh])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    for mesh, message in {
        "tensor=4": "mesh.tensor=4: must divide model.heads=2",
        "tensr=2": "--mesh tensr=2: unknown axis; did you mean tensor?",
        "fsdp=all": "--mesh fsdp=all: must be AXIS=N, such as fsdp=4",
    }.items():
        command = ["translate", f"--run={finished.folder}", "--mesh", mesh]
        assert message in error_line(command, capsys)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("s3://bucket/run", "s3:// is not supported; name a folder on a disk or gs://BUCKET/NAME"),
        ("memory://run", "memory:// is not supported; name a folder on a disk or gs://BUCKET/NAME"),
        ("gs:/bucket/run", "must be a str gs://BUCKET/NAME"),  # what Path makes of gs://bucket/run
        ("gs://bucket", "must be a str gs://BUCKET/NAME"),
        (
            "gs://bucket/run#1",
            "must be a str gs://BUCKET/NAME with letters, digits and -_.=+@/ only",
        ),
        ("gs://bucket/runs/../run", "must be a str gs://BUCKET/NAME"),
        ("gs://nowhere/run", "no such bucket"),
        ("gs://private/run", "access, 401; log in with 'gcloud auth application-default login'"),
        ("gs://bucket/missing", "needs gcsfs; pip install 'transformer-jax[gcs]'"),
    ],
)
@pytest.mark.parametrize("option", ["train --run", "average --out"])
def test_object_storage_that_cannot_be_used_is_named(
    option: str,
    place: str,
    message: str,
    finished: Run,
    nothing_written: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [*f"{option}={place}".split()]
    if command[0] == "train":
        command.append(QUICKSTART)
    if command[0] == "average":
        command.append(f"--run={finished.folder.resolve()}")
    if "gcsfs" in message:
        monkeypatch.setitem(sys.modules, "gcsfs", None)
    error = error_line(command, capsys)
    assert f"error: {place}: " in error
    assert message in error


def test_what_needs_a_disk_is_refused_in_object_storage(
    finished: Run, nothing_written: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run, new = f"--run={finished.folder}", "--run=gs://bucket/runs/new"
    train, url = ["train", QUICKSTART], "gs://bucket/x"
    for command, message in (
        ([*train, new, "--profile=2"], "--profile=2: needs a run on a disk, not gs://"),
        ([*train, new, "--tensorboard"], "--tensorboard: needs a run on a disk, not gs:"),
        ([*train, "--run=r", f"--config.data.cache={url}"], f"data.cache={url}: gs:// is"),
        (["translate", run, "--input=/dev/null", f"--output={url}"], f"--output={url}: gs:// is"),
        (["translate", run, f"--input={url}"], f"{url}: No such file or directory"),
        (["bench", "attention", f"--dump={url}"], "--dump=gs:/bucket/x: gs:// is not supported"),
        (["bench", "attention", f"--out={url}"], "--out=gs:/bucket/x: gs:// is not supported"),
    ):
        assert message in error_line(command, capsys)
