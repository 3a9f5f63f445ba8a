"""The command `transformer-jax`: train, translate, evaluate, average, inspect, bench attention.

Options (options.py) are read by tyro; `--config=PATH` and `--config.a.b=value` are taken off first.
Bad input is one line on standard error and exit status 2; `--debug` shows the traceback.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from transformer_jax.allocator import restart_with_allocator
from transformer_jax.config import Config, did_you_mean, load_config_file
from transformer_jax.options import COMMANDS, BenchAttention, Inspect, Train


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command line; without `argv` that of this program.

    Exits with 2 on bad input, with 130 when interrupted.
    """
    if argv is None:
        restart_with_allocator()
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="transformer-jax: %(levelname)s: %(message)s")
    try:
        _dispatch(arguments)
    except (ValueError, OSError) as error:
        if "--debug" in arguments:
            raise
        print(f"transformer-jax: error: {_one_line(str(error))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return
    words = 2 if arguments[0] == "bench" else 1
    name, rest = " ".join(arguments[:words]), arguments[words:]
    if name not in COMMANDS:
        raise ValueError(f"{name}: unknown command{did_you_mean(name, COMMANDS)}")
    program = f"transformer-jax {name}"
    path, overrides, rest = split_config(rest)
    if "--help-config" in rest:
        parse(Fields, ["--help"], program, Fields(Config()))
    options = parse(COMMANDS[name], rest, program)
    # Imported here, so that --help does not wait for JAX.
    from transformer_jax import commands

    if isinstance(options, Train | Inspect):
        getattr(commands, name)(options, resolve(path, overrides, options.run))
    elif path or overrides:
        why = "has no config" if name.startswith("bench") else "takes the config from the run"
        raise ValueError(f"--config: {name} {why}")
    elif isinstance(options, BenchAttention):
        from transformer_jax.benchmark import attention

        attention.bench(options)
    else:
        getattr(commands, name)(options)


def split_config(arguments: Sequence[str]) -> tuple[str | None, list[str], list[str]]:
    """Takes `--config=PATH` and `--config.a.b=value` (or with a space) off a command line.

    Returns the path, the arguments that set fields, and the rest.
    """
    paths: list[str] = []
    overrides: list[str] = []
    rest: list[str] = []
    taking = rest
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name == "--config":
            taking = paths
            paths += [value] if equals else []
            continue
        if name.startswith("--"):
            taking = overrides if name.startswith("--config.") else rest
        taking.append(argument)
        taking = rest if taking is paths else taking
    if len(paths) > 1:
        raise ValueError(f"--config: given {len(paths)} times: {', '.join(paths)}")
    return paths[0] if paths else None, overrides, rest


def resolve(path: str | None, overrides: Sequence[str], folder: Path | None) -> Config:
    """The config of the file `path`, or of the run in `folder`, with fields set by `overrides`."""
    from transformer_jax import run

    if path is not None:
        config = load_config_file(path)
    elif folder is not None and run.exists(folder):
        config = run.load(folder).config
    else:
        where = "" if folder is None else f" ({folder} holds no run)"
        raise ValueError(f"--config: name a config file, such as configs/quickstart.py{where}")
    return parse(Fields, overrides, "transformer-jax", Fields(config)).config


@dataclass(frozen=True)
class Fields:
    """The fields of a config."""

    config: Config


def parse(kind: type[Any], arguments: Sequence[str], program: str, default: Any = None) -> Any:
    """Reads `arguments` as a `kind`; ValueError instead of tyro's boxed message and exit."""
    errors = io.StringIO()
    more = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(errors):
            flags = tyro.conf.FlagConversionOff if kind is Fields else tyro.conf.FlagCreatePairsOff
            return tyro.cli(kind, args=arguments, prog=program, config=(flags,), **more)
    except SystemExit as stop:
        if not stop.code:
            raise
    raise ValueError(_condense(errors.getvalue(), kind))


def _condense(message: str, kind: type[Any]) -> str:
    """One line of tyro's message: a title, the error, and hints, with rules between them."""
    parts = [_one_line(part) for part in re.split(r"[-─]{5,}", re.sub(r"[│╭╮╰╯]", "", message))]
    text = re.sub(r"^Error parsing [-\w.]+: (?=[\w.]+=)", "", parts[1] if parts[1:] else parts[0])
    if choice := re.match(
        r"(invalid choice '(.*)' for argument '.*')\s*\. Expected one of (.*)", text
    ):
        return choice[1] + did_you_mean(choice[2], re.findall("'(.*?)'", choice[3]))
    if text.startswith("Unrecognized options: --"):
        hints = (part.split()[3] for part in parts if part.startswith("Perhaps you meant:"))
        names = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(kind)]
        near = next(hints, None)
        given = text.split()[2].partition("=")[0]
        return f"{text}; did you mean {near}?" if near else text + did_you_mean(given, names)
    return text


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _overview() -> str:
    lines = ["transformer-jax COMMAND [options]   (COMMAND --help: its options)", ""]
    for name, kind in COMMANDS.items():
        lines.append(f"  {name:<16} {(kind.__doc__ or '').splitlines()[0]}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
