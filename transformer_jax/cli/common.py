"""What several commands do: load the user's functions, make a translator, write text."""

import contextlib
import dataclasses
import fcntl
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import ModelOptions, PairOptions, ProcessOptions, SearchOptions
from transformer_jax.config import Config, MeshConfig, from_json, require_decided
from transformer_jax.decoding import exported
from transformer_jax.decoding.scoring import HeadSelection
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.files import json_digest, local_path, named, replacing
from transformer_jax.parallel.processes import broadcast, join, require_same_everywhere
from transformer_jax.parallel.program_cache import cache_programs
from transformer_jax.runs import run
from transformer_jax.text.files import read_lines, uncompressed_name
from transformer_jax.user_code import import_module, is_function_name, search_current_folder

logger = logging.getLogger(__name__)


def set_up(options: ModelOptions, config: Config) -> None:
    """Loads the user's code, and caches compiled programs."""
    load_user_code(options, config)
    cache_programs()


def load_user_code(options: ModelOptions, config: Config) -> None:
    """Imports the modules of `--import`.

    They, and the module of the config's kernel, are also found in the current folder.
    """
    if options.modules or is_function_name(config.execution.kernel):
        search_current_folder()
        exported.enabled = False  # what they register may be another model each time
    for module in options.modules:
        import_module("--import", module)


def run_and_config(name: str | None, arguments: ConfigArguments) -> tuple[run.Run | None, Config]:
    """Returns the run of `--run`, if it is given, and the config, by default that of the run.

    UserError: there is no config, or it does not fit the run's parameters and tokenizers.
    """
    if name is None:
        return None, arguments.resolve()
    loaded = run.load(name)
    config = arguments.resolve(loaded.config)
    require_decided(f"run {loaded.folder}", loaded.config, config)
    return loaded, config


def join_processes(options: ProcessOptions) -> None:
    """Joins the other processes, if the options name a coordinator.

    UserError: options are missing or contradict each other, or the others do not answer.
    """
    address, process = options.coordinator, options.process
    if address in (None, "auto"):
        if process is not None:
            raise UserError(f"--process={process}: needs --coordinator=HOST:PORT")
        if address is not None:
            join(address, None, None)
        return
    if not re.fullmatch(r".+:\d+", address):
        raise UserError(f"--coordinator={address}: must be HOST:PORT or auto")
    if process is None:
        raise UserError(f"--coordinator={address}: needs --process=I/N, too")
    numbers = re.fullmatch(r"(\d+)/(\d+)", process)
    if not numbers or int(numbers[1]) >= int(numbers[2]):
        raise UserError(f"--process={process}: must be I/N with I from 0 to N - 1, such as 0/2")
    join(address, int(numbers[2]), int(numbers[1]))


def make_mesh_config(axes: Sequence[str]) -> MeshConfig:
    """Returns the mesh of `--mesh AXIS=N ...`. UserError: an axis is unknown, or N no number."""
    sizes: dict[str, int] = {}
    for text in axes:
        axis, _, size = text.partition("=")
        if not re.fullmatch(r"-?\d+", size):
            raise UserError(f"--mesh {text}: must be AXIS=N, such as fsdp=4")
        sizes[axis] = int(size)
    return from_json(sizes, MeshConfig, "--mesh ")


def load_translator(
    options: SearchOptions,
    arguments: ConfigArguments,
    heads: HeadSelection | None = None,
    **changes: Any,
) -> Translator:
    """Returns the translator of a run, with the search that the options change.

    heads: as in `Translator`. changes: other fields of the search; None: as the run has it.
    First joins the other processes, if the options name a coordinator.
    """
    _require_search(arguments, options.short)
    for name, value in changes.items():
        if value is not None and arguments.sets(f"decode.{name}"):
            raise UserError(f"--{name}: is also given as --config.decode.{name}; give one of them")
    join_processes(options)
    loaded, *others = map(run.load, options.run)
    if others and options.step is not None:
        raise UserError(f"--step={options.step}: needs one --run, not {len(options.run)}")
    set_up(options, loaded.config)
    options_of_search = [f"--config.decode.{k}={v}" for k, v in changes.items() if v is not None]
    overrides = [*arguments.overrides, *options_of_search]  # which are checked together
    config = arguments._replace(overrides=overrides).resolve(loaded.config)
    config = dataclasses.replace(config, mesh=make_mesh_config(options.mesh))
    require_same_everywhere(config, {})
    # All take the coordinator's choice, since training may save a better checkpoint meanwhile.
    step = broadcast(loaded.best_step() if options.step is None else options.step)
    loaded = dataclasses.replace(loaded, config=config)
    return Translator.load(loaded, *others, step=step, heads=heads)


def corpora_of(options: PairOptions, config: Config) -> Sequence[str]:
    """Returns the corpora that a command reads. UserError: neither it nor the run names one."""
    if corpora := options.data or config.data.dev:
        return corpora
    raise UserError("--data: must name a corpus, since the run has no data.dev")


def parse_layers(option: str, texts: Sequence[str]) -> list[tuple[int, int | None]]:
    """Returns the layers and heads of texts such as 2 or 2.0; "all" alone: none, for all layers.

    UserError: a text is something else.
    """
    return [parse_layer(option, text) for text in ([] if list(texts) == ["all"] else texts)]


def parse_layer(option: str, text: str) -> tuple[int, int | None]:
    """Returns the layer and the head of a text such as 2.0, or 2 for all heads.

    UserError: the text is something else.
    """
    numbers = re.fullmatch(r"(\d+)(?:\.(\d+))?", text)
    if numbers is None:
        raise UserError(f"{option} {text}: must be LAYER or LAYER.HEAD, counted from 0")
    return int(numbers[1]), None if numbers[2] is None else int(numbers[2])


@contextlib.contextmanager
def progress(source: str | int, output: str) -> Iterator[Callable[[int], None]]:
    """Shows a bar on standard error if that is a terminal and the output goes elsewhere.

    source, output: paths of text; "-" is standard input or output. source may also be the number of
    lines. Yields a function that takes the number of lines that have been translated.
    """
    console = Console(stderr=True, force_terminal=sys.stderr.isatty())
    if not console.is_terminal or (output == "-" and sys.stdout.isatty()):
        yield lambda _: None
        return
    total = source if isinstance(source, int) else None
    if isinstance(source, str) and Path(source).is_file():
        total = sum(1 for _ in read_lines(source))
    columns = TextColumn("lines"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    # On a terminal, what is printed meanwhile appears above the bar; elsewhere, it stays apart.
    options: Any = {"transient": True, "redirect_stdout": sys.stdout.isatty()}
    with Progress(*columns, console=console, **options) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)


def warn_cut(outputs: Sequence[bool], name: str) -> None:
    """Warns of translations that stop at their greatest length. outputs: whether each one does."""
    if count := sum(outputs):
        cut = f"{count} of {len(outputs)} translations stop at their greatest length"
        logger.warning("%s: %s (decode.max_ratio, max_length)", name, cut)


def output_file(name: str, inputs: Iterable[str | None] = ()) -> Path:
    """Returns the path of `--output`. UserError: no file can be there, or it is one of `inputs`."""
    path = local_path(name, "--output")
    if path.is_file() and any(Path(i).exists() and path.samefile(i) for i in inputs if i):
        raise UserError(f"--output={path}: is also an input; name another file")
    if path.is_dir():
        raise UserError(f"--output={path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise UserError(f"--output={path}: there is no folder {path.parent}; make it first")
    if end := name.removeprefix(uncompressed_name(name)):
        raise UserError(f"--output={path}: is written as plain text; name it without {end}")
    return path


LEFT_OUT = "\r"
"""The line of an input that has no line in the output, as long as that is not whole. Outputs hold
no carriage return."""

Write = Callable[[str | None], None]
"""Writes a line; None: there is none for this input."""


@contextlib.contextmanager
def text_output(
    path: str, depends_on: Callable[[], Any], inputs: Iterable[str | None] = ()
) -> Iterator[tuple[Write, int]]:
    """Opens standard output ("-"), a device, or a file, which is there once it is whole.

    Until then its lines are in NAME.DIGEST.part, to which a later call adds if the digest, of what
    they depend on, is the same. Yields a function that writes, and the number of inputs whose lines
    are there already.
    """
    if path == "-":
        yield _writing_to(sys.stdout), 0
        return
    file = output_file(path, inputs)
    if file.exists() and not file.is_file():
        with named(file), file.open("w", encoding="utf-8") as device:
            yield _writing_to(device), 0
        return
    part = file.with_name(f"{file.name}.{json_digest(depends_on())[:12]}.part")
    with named(file, part), part.open("a+", encoding="utf-8", newline="\n") as output:
        count = _resume(output)
        try:
            yield _writing_to(output, LEFT_OUT), count
        except BaseException:
            if not part.stat().st_size:
                part.unlink()
            raise
        output.seek(0)
        with replacing(file) as temporary, temporary.open("w", encoding="utf-8") as whole:
            whole.writelines(line for line in output if line != f"{LEFT_OUT}\n")
        part.unlink()


def _writing_to(file: Any, left_out: str | None = None) -> Write:
    def write(line: str | None) -> None:
        line = left_out if line is None else line
        if line is not None:
            print(line, file=file, flush=True)

    return write


def _resume(part: TextIO) -> int:
    """Returns the number of whole lines of a file, and removes what follows them.

    UserError: another process writes to it.
    """
    try:
        fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"{part.name}: another process writes to it; wait for its end") from error
    part.buffer.seek(0)
    lengths = [len(line) for line in part.buffer if line.endswith(b"\n")]
    part.buffer.truncate(sum(lengths))
    if lengths:
        print(f"{part.name}: continues after {len(lengths):,} lines", file=sys.stderr)
    return len(lengths)


def _require_search(arguments: ConfigArguments, short: Sequence[str]) -> None:
    """Checks that only fields of the search are set, or those of `short`. UserError: others are."""
    others = ["--config"] if arguments.path else []
    others += [name.partition("=")[0] for name in arguments.overrides if name.startswith("--")]
    for name in others:
        if not name.startswith(("--config.decode.", *(f"--config.{field}" for field in short))):
            raise UserError(
                f"{name}: the config is that of the run; only the search can be changed, as by "
                "--config.decode.beam=4"
            )
