"""Parses command lines with tyro, with errors of one line.

`--config=PATH` and `--config.FIELD=VALUE` are separated from a command's own options first, since
the defaults of the fields come from the config file.
"""

import contextlib
import dataclasses
import io
import re
import typing
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tyro

from transformer_jax.config import Config, did_you_mean, load_config_file
from transformer_jax.errors import UserError
from transformer_jax.files import find_path
from transformer_jax.user_code import is_function_name


class ConfigArguments(NamedTuple):
    """The arguments that make up a config."""

    path: str | None  # of the config file
    overrides: list[str]  # --config.FIELD=VALUE, or --config.FIELD and values

    def sets(self, field: str) -> bool:
        """Returns whether an override sets `field`, such as "execution.kernel"."""
        names = (each.partition("=")[0].replace("-", "_") for each in self.overrides)
        return f"__config.{field}" in names

    def resolve(self, stored: Config | None = None, origin: str = "") -> Config:
        """Returns the config of the file, or else `stored`, with the overrides applied.

        origin: names what `stored` is from, in errors, and ends with a colon. UserError: there is
        none, or a kernel of the user's own is stored in it, or in a JSON file. Such a name is
        loaded from the command line or a Python file only, and never silently replaced by another
        kernel.
        """
        if self.path is not None and not self.path.lower().endswith(".json"):
            config = load_config_file(self.path)
        else:
            config = stored if self.path is None else _read_json(self.path)
            if config is None:
                raise UserError("--config: name a config file, or a config such as quickstart")
            kernel = config.execution.kernel
            if is_function_name(kernel) and not self.sets("execution.kernel"):
                raise UserError(
                    f"{origin}execution.kernel={kernel!r}: is not loaded from a file; give "
                    f"--config.execution.kernel={kernel} or --config.execution.kernel=auto"
                )
        if not self.overrides:  # tyro takes a while to find all fields
            return config
        return parse(Fields, self.overrides, "transformer-jax", Fields(config)).config


def _read_json(path: str) -> Config:
    from transformer_jax.runs.run import read_config  # which imports JAX

    return read_config(find_path(path))[1]


def split_config(arguments: Sequence[str]) -> tuple[ConfigArguments, list[str]]:
    """Separates the arguments of the config from the others."""
    paths: list[str] = []
    overrides: list[str] = []
    others: list[str] = []
    values = others  # the list that the values after an option belong to
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name == "--config":
            path = value if equals else next(remaining, "")
            if not path or path.startswith("-"):
                raise UserError("--config: needs the path of a config file")
            paths.append(path)
            values = others
            continue
        if name.startswith("--") or argument == "-h":
            values = overrides if name.startswith("--config.") else others
        values.append(argument)
    if len(paths) > 1:
        raise UserError(f"--config: given {len(paths)} times: {', '.join(paths)}")
    return ConfigArguments(paths[0] if paths else None, overrides), others


@dataclass(frozen=True)
class Fields:
    """The fields of a config as options."""

    config: Config


def options_of(kind: type[Any]) -> dict[str, bool]:
    """Returns the options that a command accepts, and whether each may be given several times."""
    hints = typing.get_type_hints(kind, include_extras=True)
    options = {"--config": True} if getattr(kind, "takes_config", False) else {}
    for field in dataclasses.fields(kind):
        about = getattr(hints[field.name], "__metadata__", ())
        if tyro.conf.Positional not in about:
            name = next(filter(None, (getattr(each, "name", None) for each in about)), field.name)
            options[f"--{name.replace('_', '-')}"] = tyro.conf.UseAppendAction in about
    short = getattr(kind, "short", ())
    return options | {f"--{field.partition('.')[2]}": False for field in short}


def require_once(kind: type[Any], arguments: Sequence[str]) -> None:
    """UserError: an option is given again, and its first values would be lost."""
    names = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    names = ["--output" if name == "-o" else name for name in names]
    repeatable = [name for name, several in options_of(kind).items() if several]
    for name, count in Counter(names).items():
        if count > 1 and name.startswith("--") and name not in repeatable:
            raise UserError(f"{name}: given {count} times; give it once, with all its values")


def parse(kind: type[Any], arguments: Sequence[str], program: str, default: Any = None) -> Any:
    """Returns the arguments as a `kind`. UserError in place of tyro's boxed message and exit."""
    errors = io.StringIO()
    flags = tyro.conf.FlagConversionOff if kind is Fields else tyro.conf.FlagCreatePairsOff
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(kind, args=arguments, prog=program, config=(flags,), default=default)
    except SystemExit as stop:
        if not stop.code:
            raise
    raise UserError(_condense(errors.getvalue(), kind))


def _condense(message: str, kind: type[Any]) -> str:
    """Returns one line of tyro's message: a title, the error and hints, separated by rules."""
    parts = [one_line(part) for part in re.split(r"[-─]{5,}", re.sub(r"[│╭╮╰╯]", "", message))]
    text = parts[1] if parts[1:] else parts[0]
    text = re.sub(r"^Error parsing [-\w.]+: (?=[\w.]+=|--)", "", text)
    if choice := re.match(
        r"(invalid choice '(.*)' for argument '.*')\s*\. Expected one of (.*)", text
    ):
        return choice[1] + did_you_mean(choice[2], re.findall("'(.*?)'", choice[3]))
    if text.startswith("Unrecognized options: --"):
        hints = (part.split()[3] for part in parts if part.startswith("Perhaps you meant:"))
        if nearest := next(hints, None):
            return f"{text}; did you mean {nearest}?"
        unknown = text.split()[2].partition("=")[0]
        section = typing.get_type_hints(Config).get(unknown.removeprefix("--config.").split(".")[0])
        if section is not None:
            names = [field.name.replace("_", "-") for field in dataclasses.fields(section)]
            return f"{text}; known: {', '.join(names)}"
        return text + did_you_mean(unknown, options_of(kind))
    return text


def one_line(text: str) -> str:
    """Returns the words of `text` in one line."""
    return " ".join(text.split())
