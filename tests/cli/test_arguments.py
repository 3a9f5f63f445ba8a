"""Options and fields of the config on a command line."""

import json
import platform
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import jax
import pytest
from common import Capture, Patch, error_line, flat, printed

from transformer_jax import __version__
from transformer_jax.cli.arguments import ConfigArguments, options_of, parse, split_config
from transformer_jax.cli.commands import COMMANDS, Translate
from transformer_jax.cli.main import main
from transformer_jax.config import Config, to_json
from transformer_jax.runs.run import Run

FIELDS = list(flat(to_json(Config()), "."))


def test_config_is_split_off_the_command_line() -> None:
    given = ["--config", "a.py", "--run", "r", "--config.data.train", "x", "y", "--new"]
    config, rest = split_config(given)
    assert config.path == "a.py"
    assert config.overrides == ["--config.data.train", "x", "y"]
    assert rest == ["--run", "r", "--new"]
    assert split_config(["--config=b.py"])[0].path == "b.py"
    with pytest.raises(ValueError, match="given 2 times"):
        split_config(["--config=b.py", "--config=c.py"])


def test_fields_are_set_from_the_command_line() -> None:
    path = "configs/quickstart.py"
    options = ["--config.model.layers=5", "--config.model.bias", "False"]
    config = ConfigArguments(path, options).resolve()
    assert (config.model.layers, config.model.bias) == (5, False)
    for file, wrong, message in (
        (path, ["--config.model.layrs=4"], r"layrs=4.*did you mean --config.model.layers"),
        (path, ["--config.model.heads=7"], r"^model.heads=7: must be a divisor"),
        (path, ["--config.model.layers=x"], r"--config.model.layers.*'x'"),
        ("none.py", [], r"config file none\.py: no such file"),
        (None, [], "name a config file"),
    ):
        with pytest.raises(ValueError, match=message):
            ConfigArguments(file, wrong).resolve()


def test_help_config_shows_every_field(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help-config"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name in FIELDS:
        assert f"--config.{name.replace('_', '-')} " in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_short_with_an_example_and_lists_the_options(
    command: str, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert not stop.value.code
    text = capsys.readouterr().out
    assert len(text.rstrip().splitlines()) <= 25
    assert "(default: )" not in text
    assert f"transformer-jax {command} --" in text
    kind, _ = COMMANDS[command]
    shown = re.findall(r"^│ +(?:-\w.*, )?(--[\w-]+)", text, re.MULTILINE)
    config = ["--config"] if kind.takes_config else []
    short = [f"--{field.partition('.')[2]}" for field in kind.short]
    assert {*options_of(kind), "--help"} == {*shown, *config, *short}


def test_options_of_other_commands_are_not_proposed(capsys: Capture) -> None:
    assert "--config" not in error_line(["average", "--run=r", "--out=o", "--xyzzy"], capsys)
    assert "--sources" not in error_line(["plot", "--output=o", "r", "--xyzzy"], capsys)


def test_options_that_append_may_be_given_again() -> None:
    options = parse(Translate, ["--run=a", "--run", "b"], "transformer-jax translate")
    assert options.run == ("a", "b")


def test_home_is_found_in_options(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    error = error_line(["translate", "--run=~/runs/a"], capsys)
    assert f"run {tmp_path}/runs/a: no such folder" in error
    config = ["train", "--config=configs/quickstart.py", "--run=~/r"]
    error = error_line([*config, "--config.data.train=~/a.en,~/a.de"], capsys)
    assert f"{tmp_path}/a.en: No such file" in error


def test_a_stored_config_is_read_as_such(finished: Run, tmp_path: Path, capsys: Capture) -> None:
    stored = finished.folder / "config.json"
    copy = tmp_path / "mine.JSON"
    copy.write_bytes(stored.read_bytes())
    longer = replace(finished.config, train=replace(finished.config.train, steps=99))
    for path in (stored, copy):
        assert ConfigArguments(str(path), []).resolve() == finished.config
        assert ConfigArguments(str(path), ["--config.train.steps=99"]).resolve() == longer
    text, trace = stored.read_text(), tmp_path / "trace"
    for wrong, message in (
        (text.replace('"d_ff": 32', '"d_ff": 64'), "is damaged or was edited"),
        (text[:-9], "is damaged: not JSON"),
        ('{"rows": {}}', "is not a run's config"),
        (f"{{'a': open({str(trace)!r}, 'w')}}", "is damaged: not JSON"),
    ):
        copy.write_text(wrong)
        error = error_line(["inspect", f"--config={copy}"], capsys)
        assert f"error: {copy}: {message}" in error
    copy.unlink()
    command = ["train", f"--run={tmp_path / 'r'}", f"--config={copy}"]
    assert f"No such file or directory: '{copy}'" in error_line(command, capsys)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("command", ["train --run=r", "inspect", "check"])
def test_a_kernel_that_a_json_file_names_is_not_imported(
    command: str, finished: Run, here: Path, capsys: Capture
) -> None:
    Path("evil.py").write_text("open('trace', 'w')")
    stored = json.loads((finished.folder / "config.json").read_text())
    del stored["sha256"]
    stored["config"]["execution"]["kernel"] = "evil:kernel"
    Path("c.json").write_text(json.dumps(stored))
    error = error_line([*command.split(), "--config=c.json"], capsys)
    assert "execution.kernel='evil:kernel': is not loaded from a file; give" in error
    assert {path.name for path in here.iterdir()} == {"evil.py", "c.json"}
    arguments = ConfigArguments("c.json", ["--config.execution.kernel=auto"])
    assert arguments.resolve().execution.kernel == "auto"


def test_versions_are_those_of_a_report(capsys: Capture) -> None:
    lines = dict(line.split(maxsplit=1) for line in printed(["--version"], capsys).splitlines())
    assert lines["transformer-jax"] == __version__
    assert (lines["jax"], lines["flax"]) == (jax.__version__, version("flax"))
    assert lines["python"] == platform.python_version()
    assert lines["devices"] == "8 cpu"
