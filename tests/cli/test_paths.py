"""Files and folders may have any name that is UTF-8, wherever the command line takes one."""

import json
import os
import shutil
from pathlib import Path

import pytest
from common import Capture, Patch, changed, error_line, write_pairs

from tools.common import config_file
from transformer_jax.cli.main import main
from transformer_jax.config import Config, DataConfig, from_json, to_json
from transformer_jax.errors import UserError
from transformer_jax.runs import card, run
from transformer_jax.runs.run import Run

ODD = "a [b]*?{c,d}\\%s%20#~$H'\"\n;&|<é>[bold]"
"""A name with characters that mean something to globs, shells, URLs, formats or markup."""


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """An empty folder of that name."""
    (tmp_path / ODD).mkdir()
    return tmp_path / ODD


@pytest.mark.long
def test_a_run_is_trained_continued_and_used_below_an_odd_folder(
    odd: Path, tiny_config: Config, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(odd / "cache"))
    train, dev = write_pairs(odd, "train", 150, 1), write_pairs(odd, "dev", 20, 2)
    config = changed(
        tiny_config,
        data={"train": (train,), "dev": (dev,), "cache": ""},
        train={"steps": 2, "evaluate_every": 2, "save_every": 2},
    )
    command = ["train", f"--config={config_file(config, odd / 'config.py')}", f"--run={odd / 'r'}"]
    main(command)
    main(["train", f"--run={odd / 'r'}", "--config.train.steps=4"])
    assert f"{dev}".splitlines()[0].split("[b]")[1] in capsys.readouterr().err
    reached = run.load(odd / "r")
    assert reached.newest_steps() == [2, 4]
    lines, out = odd / "dev.en", odd / "out.de"
    main(["translate", f"--run={odd / 'r'}", f"--input={lines}", f"--output={out}", "--beam=1"])
    assert len(out.read_text("utf-8").split("\n")) == 21
    (odd / "result.json").write_text(json.dumps({"card": card.make(reached)}), "utf-8")
    assert card.load(str(odd / "result.json")).config == reached.config


@pytest.mark.parametrize("format", ["int8", "ctranslate2", "stablehlo"])
def test_exports_are_written_below_an_odd_folder(odd: Path, finished: Run, format: str) -> None:
    source = Path(shutil.copytree(finished.folder, odd / "run"))
    if format == "ctranslate2":
        pytest.importorskip("ctranslate2")
    main(["export", f"--run={source}", f"--format={format}", f"--out={odd / format}"])
    assert len([*(odd / format).iterdir()]) >= 3
    if format == "int8":
        main(["average", f"--run={source}", f"--out={odd / 'mean'}"])
        assert run.load(odd / "mean").params()


@pytest.mark.parametrize(
    "command",
    [
        "train --config=quickstart --run=X",
        "train --config=quickstart --run=r --config.data.train=X",
        "train --config=X --run=r",
        "translate --run=X",
        "translate --run=r --input=X",
        "translate --run=r --output X",
        "evaluate --run=r --baseline X",
        "average --run=r --out=X",
        "plot r --output=X",
    ],
)
def test_names_that_are_not_utf8_are_refused(command: str, capsys: Capture, here: Path) -> None:
    name = os.fsdecode(b"caf\xe9.tsv")
    arguments = [word.replace("X", name) for word in command.split()]
    error = error_line(arguments, capsys)
    assert r"caf\udce9.tsv: is not UTF-8; give the file or folder another name" in error
    assert not [*here.iterdir()]


def test_python_and_files_give_no_such_names_either(finished: Run) -> None:
    with pytest.raises(UserError, match=r"data\.cache=.*must be Unicode text"):
        DataConfig(cache="\udce9")
    stored = to_json(finished.config)
    stored["data"]["train"] = ["\udce9.tsv"]
    with pytest.raises(UserError, match=r"data\.train=.*must be Unicode text"):
        from_json(stored)
    with pytest.raises(UserError, match="is not UTF-8"):
        run.average(finished, [12], "\udce9")
