"""Options and fields of the config on a command line."""

import pytest
from common import flat

from transformer_jax.cli.arguments import ConfigArguments, split_config
from transformer_jax.cli.main import main
from transformer_jax.config import Config, to_json

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
    config = ConfigArguments(
        path, ["--config.model.layers=5", "--config.model.bias", "False"]
    ).resolve()
    assert (config.model.layers, config.model.bias) == (5, False)
    with pytest.raises(
        ValueError, match=r"--config.model.layrs=4.*did you mean --config.model.lay"
    ):
        ConfigArguments(path, ["--config.model.layrs=4"]).resolve()
    with pytest.raises(ValueError, match=r"^model.heads=7: must be a divisor"):
        ConfigArguments(path, ["--config.model.heads=7"]).resolve()
    with pytest.raises(ValueError, match=r"--config.model.layers.*'x'"):
        ConfigArguments(path, ["--config.model.layers=x"]).resolve()
    with pytest.raises(ValueError, match=r"config file none\.py: no such file"):
        ConfigArguments("none.py", []).resolve()
    with pytest.raises(ValueError, match="name a config file"):
        ConfigArguments(None, []).resolve()


def test_help_config_shows_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help-config"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name in FIELDS:
        assert f"--config.{name.replace('_', '-')} " in text
