"""Runs are made whole or not at all, and a run of this format translates the same."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from common import translations

from transformer_jax.config import DecodeConfig
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.files import AnyPath, files_below
from transformer_jax.runs import run
from transformer_jax.runs.run import Run


@pytest.mark.parametrize(("column", "beam"), [pytest.param(1, 1, marks=pytest.mark.long), (2, 4)])
def test_a_run_of_this_format_translates_the_same(fixtures: Path, column: int, beam: int) -> None:
    rows = translations(fixtures)
    translator = Translator.load(fixtures / "run", decode=DecodeConfig(beam=beam))
    assert translator([row[0] for row in rows]) == [row[column] for row in rows]


def test_unchosen_checkpoints_are_named(fixtures: Path) -> None:
    with pytest.raises(ValueError, match="2500"):
        Translator.load(fixtures / "run", step=7)


def again(folder: AnyPath, old: Run, save: Callable[[AnyPath], None] = lambda _: None) -> Run:
    """A new run with the config and the tokenizer of `old`."""
    return run.create(replace(old, folder=folder), save)


def test_a_run_is_made_in_the_current_folder(
    fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder stays the one it was: whoever stands in it sees the run."""
    old, folder = run.load(fixtures / "run"), tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    number = folder.stat().st_ino
    again(Path(), old)
    assert run.load(Path()).config == old.config
    assert folder.stat().st_ino == number
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_run_that_cannot_be_made_leaves_nothing(fixtures: Path, place: AnyPath) -> None:
    old, folder = run.load(fixtures / "run"), place / "r"

    def full(checkpoints: AnyPath) -> None:
        if isinstance(checkpoints, Path):  # in a bucket there are no folders
            checkpoints.mkdir()
        (checkpoints / "part").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        again(folder, old, full)
    assert not run.exists(folder)
    assert files_below(place) == {}
    assert again(folder, old).folder == folder
    with pytest.raises(UserError, match="is not empty; name a new folder"):
        again(folder, old)


@pytest.mark.parametrize("moment", ["tokenizer.save", "_write"])
def test_a_run_killed_in_making_is_made_anew(moment: str, fixtures: Path, tmp_path: Path) -> None:
    """As by SIGKILL, before the first or before the last file is written."""
    folder = tmp_path / "r"
    code = f"""
import dataclasses, os, pathlib
from transformer_jax.runs import run
new = dataclasses.replace(run.load("{fixtures / "run"}"), folder=pathlib.Path("{folder}"))
run.{moment} = lambda *_: os._exit(9)
run.create(new, lambda checkpoints: checkpoints.mkdir())
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == 9
    assert not run.exists(folder)
    again(folder, run.load(fixtures / "run"))
    assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.model"}
    with pytest.raises(UserError, match="is not empty"):
        again(folder, run.load(fixtures / "run"))


def test_a_run_is_made_in_a_mounted_folder(
    fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files cannot be renamed across file systems, so none is moved to another folder."""
    rename = os.replace

    def checked(old: Path, new: Path) -> None:
        if Path(old).parent != Path(new).parent:
            raise OSError(18, "Invalid cross-device link")
        rename(old, new)

    monkeypatch.setattr(os, "replace", checked)
    monkeypatch.setattr(os, "rename", checked)
    (tmp_path / "mount").mkdir()
    again(tmp_path / "mount", run.load(fixtures / "run"))
    assert run.load(tmp_path / "mount").config


@pytest.mark.parametrize("other", [run.FORMAT - 1, run.FORMAT + 1])
def test_a_run_of_another_format_is_refused(other: int, fixtures: Path, tmp_path: Path) -> None:
    folder = tmp_path / "r"
    shutil.copytree(fixtures / "run", folder)
    path = folder / "config.json"
    stored = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(stored | {"format": other}), "utf-8")
    message = f"^{path}: format={other}: this version reads {run.FORMAT}$"
    for read in (run.load, run.load_config):
        with pytest.raises(UserError, match=message):
            read(folder)
