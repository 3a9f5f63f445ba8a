"""The command `transformer-jax`: finds a command in `COMMANDS`, parses its options and runs it.

Errors of the user are one line on standard error and exit status 2; `--debug` shows the traceback.
"""

import gc
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import takewhile
from typing import Any, NoReturn

from transformer_jax.allocator import restart_with_allocator
from transformer_jax.cli.arguments import Fields, one_line, parse, require_once, split_config
from transformer_jax.cli.commands import COMMANDS, Options, ProcessOptions, SearchOptions
from transformer_jax.config import Config, did_you_mean
from transformer_jax.errors import UserError, printable, require_unicode
from transformer_jax.files import exit_now


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command line; without `argv` that of this program.

    Exits with status 2 after an error of the user, with 130 after an interrupt, and with 141 once
    nobody reads its output. Any other exception is a defect and is raised.
    """
    if argv is None:
        restart_with_allocator()
        sys.unraisablehook = partial(end_if_interrupted, show=sys.unraisablehook)
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # whatever the terminal: text is UTF-8
        sys.stdout.reconfigure(encoding="utf-8")
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter("transformer-jax: %(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    try:
        _dispatch(arguments, is_program=argv is None)
    except BrokenPipeError:
        # The reader of the output has ended, which is no error. Python would report it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _exit(128 + signal.SIGPIPE)
    except (UserError, OSError, RuntimeError) as error:
        message = str(error)
        if no_memory := message.startswith("RESOURCE_EXHAUSTED"):  # one of JAX
            message = f"{message.splitlines()[0]}; needs smaller batches"
        if "--debug" in arguments or (isinstance(error, RuntimeError) and not no_memory):
            raise
        print(f"transformer-jax: error: {printable(one_line(message))}", file=sys.stderr)
        _exit(2)
    except KeyboardInterrupt:
        _exit(128 + signal.SIGINT, now=argv is None)  # programs may be being compiled


def end_if_interrupted(lost: Any, show: Callable[[Any], object] = sys.__unraisablehook__) -> None:
    """Ends this process at an interrupt that Python would lose, as in JAX's callback of the garbage
    collector. Other exceptions that cannot be raised are shown by `show`."""
    if lost.exc_type is KeyboardInterrupt:
        exit_now(128 + signal.SIGINT)
    show(lost)


def end_at_interrupt() -> None:
    """Makes SIGINT end this process within a second, also while its threads run programs, and where
    Python loses the exception, as in callbacks of weak references."""
    from transformer_jax.parallel.processes import leave

    def end(number: int, frame: Any) -> None:
        leave(128 + number, soon=True)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored
        signal.signal(signal.SIGINT, end)


def _exit(status: int, *, now: bool = False) -> NoReturn:
    if "jax" in sys.modules:  # which joins processes
        from transformer_jax.parallel.processes import end_now, leave

        if now:
            end_now(status)
        leave(status)
    sys.exit(status)


def _end() -> None:
    """Ends this process, if it is the only one, without deleting its objects one by one, which
    takes most of a second."""
    from transformer_jax.parallel.processes import end_now, this_process

    sys.stdout.flush()  # whose errors are those of the user
    if this_process()[1] == 1:
        end_now(0)


class _PrintableFormatter(logging.Formatter):
    """Formats log records as one line that is safe to print."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _dispatch(arguments: Sequence[str], is_program: bool) -> None:
    for argument in arguments:
        require_unicode(argument)
    arguments = [_at_home(argument) for argument in arguments]
    if not arguments or arguments[0] in ("-h", "--help", "--version"):
        print(_versions() if arguments[:1] == ["--version"] else _overview())
        return
    name, rest = _find_command(arguments)
    (kind, runs), program = COMMANDS[name], f"transformer-jax {name}"
    rest = [_expanded(argument, kind.short) for argument in rest if argument != "--debug"]
    config, rest = split_config(rest)
    if "--help-config" in rest:
        parse(Fields, ["--help"], program, Fields(Config()))
    require_once(kind, [*rest, *config.overrides])
    options: Options = parse(kind, rest, program)
    if not kind.takes_config and (config.path or config.overrides):
        why = "takes the config from the run" if hasattr(options, "run") else "has no config"
        raise UserError(f"--config: {name} {why}")
    if isinstance(options, ProcessOptions) and options.processes is not None:
        from transformer_jax.cli.launch import launch

        launch(arguments, options)
    else:
        module, _, function = runs.partition(":")
        run = getattr(_import(f"transformer_jax.cli.{module}"), function)
        run = partial(run, options, *(config,) if kind.takes_config else ())
        if is_program and isinstance(options, SearchOptions):
            end_at_interrupt()
            _import("transformer_jax.decoding.exported").enabled = True
            run()
            _end()
        else:
            run()


def _import(name: str) -> Any:
    """Imports a module without garbage collection, which would take a tenth of the time and find
    nothing, since all of it stays."""
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.enable()


def _at_home(argument: str) -> str:
    """Returns an option with the home folder for each `~` that begins a path: shells put it there
    at the beginning of an argument only."""
    home = os.environ.get("HOME", "~")
    is_option = argument.startswith("--")
    return re.sub("(?<=[=,])~(?=[/,]|$)", lambda _: home, argument) if is_option else argument


def _expanded(argument: str, short: Sequence[str]) -> str:
    """Returns `--config.SECTION.NAME` for `--NAME`, if SECTION.NAME is one of `short`."""
    name, equals, value = argument.partition("=")
    fields = {f"--{field.partition('.')[2]}": f"--config.{field}" for field in short}
    return fields.get(name.replace("_", "-"), name) + equals + value


def _find_command(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Returns the name of the command, of one or two words, and the arguments after it."""
    for name in COMMANDS:
        words = name.split()
        if arguments[: len(words)] == words:
            return name, arguments[len(words) :]
    unknown = " ".join(takewhile(lambda word: not word.startswith("-"), arguments[:2]))
    raise UserError(f"{unknown}: unknown command{did_you_mean(unknown, COMMANDS)}")


def _versions() -> str:
    """Returns what a report of a defect begins with: versions of the software, and the devices."""
    import jax  # when it is needed, since this takes half a second

    from transformer_jax.runs.run import versions

    devices = f"{jax.device_count()} {jax.devices()[0].device_kind}"
    lines = versions() | {"devices": devices}
    return "\n".join(f"{name:<17} {value}" for name, value in lines.items())


def _overview() -> str:
    lines = ["transformer-jax COMMAND [options]   (--help: its options; --debug: tracebacks)"]
    lines += ["transformer-jax --version", ""]
    for name, (kind, _) in COMMANDS.items():
        lines.append(f"  {name:<16} {(kind.__doc__ or '').splitlines()[0]}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
