"""What README.md and docs/*.md show is true: their code runs, their commands are accepted.

Blocks of a page run from top to bottom in one folder, which has what a reader has: config files (of
a tiny model), the run runs/quickstart, and text. Python blocks share their names, and one whose
first line is `# NAME.py` is also such a file. Blocks marked `sh` run; those marked `console` also
show their output. The commands of other blocks are parsed only.
"""

import dataclasses
import fnmatch
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from common import ONE_DEVICE, flat, write_pairs

from tools.common import config_file
from tools.documents import DOCUMENTS
from transformer_jax.cli import commands as cli_commands
from transformer_jax.cli import launch
from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import COMMANDS, Options
from transformer_jax.cli.main import main
from transformer_jax.config import Config, to_json
from transformer_jax.runs.run import Run
from transformer_jax.training.trainer import train

ROOT = Path(__file__).parents[2]


class Block(NamedTuple):
    """A block of code, and the word after its fence."""

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    fenced = re.findall(r"^( *)```(.*)\n([\s\S]*?)^\1```$", page.read_text("utf-8"), re.M)
    return [Block(language, textwrap.dedent(text)) for _, language, text in fenced]


def pages(*languages: str) -> list[Any]:
    """The pages that have a block of one of the languages."""
    having = [page for page in DOCUMENTS if {*languages} & {b.language for b in blocks(page)}]
    return [pytest.param(page, id=str(page.relative_to(ROOT).with_suffix(""))) for page in having]


def runnable() -> list[Any]:
    """The pages whose code runs. Most but the READMEs take a minute or more."""
    for_all = pages("python", "sh", "console")
    marks = [pytest.mark.slow if "docs" in page.id else pytest.mark.long for page in for_all]
    return [page._replace(marks=[mark]) for page, mark in zip(for_all, marks, strict=True)]


@pytest.fixture(scope="module")
def config(tiny_config: Config) -> Config:
    """The tiny config without attention dropout, as a reader's: some scores refuse it."""
    model = dataclasses.replace(tiny_config.model, attention_dropout=0.0)
    return dataclasses.replace(tiny_config, model=model)


@pytest.fixture(scope="module")
def quickstart(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of a reader."""
    return train(config, tmp_path_factory.mktemp("runs") / "quickstart")


@pytest.fixture
def folder(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a reader, but for the run. It is the current one."""
    (tmp_path / "configs").mkdir()
    for path in (ROOT / "configs").glob("*.py"):
        config_file(config, tmp_path / "configs" / path.name)
    for name in ("train", "dev", "test"):
        write_pairs(tmp_path, name, 64, 3)
    shutil.copytree(ROOT / "models", tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def run_python(text: str, space: dict[str, Any]) -> None:
    if named := re.match(r"# (\w+\.py)\n", text):
        Path(named[1]).write_text(text, "utf-8")
    exec(compile(text, "page", "exec"), space)


def run_shell(text: str, folder: Path) -> tuple[int, str]:
    """The status and the output of commands, as a reader runs them, but compiled as tests are."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | ONE_DEVICE | own,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("page", runnable())
def test_the_code_of_a_page_runs(page: Path, folder: Path, quickstart: Run) -> None:
    shutil.copytree(str(quickstart.folder), folder / "runs" / "quickstart")
    space: dict[str, Any] = {}
    for language, text in blocks(page):
        if language == "python":
            run_python(text, space)
        elif language == "sh":
            status, output = run_shell(text, folder)
            assert status == 0, output
        elif language == "console":
            command, _, shown = text.partition("\n")
            assert run_shell(command.removeprefix("$ "), folder)[1] == shown


PROGRAMS = {"transformer-jax": [], "deploy/slurm.sh": ["train"], "deploy/tpu_pod.sh": ["train"]}
"""What stands before options of the command, and the words that these begin with."""


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of each `transformer-jax` in a block."""
    for line in text.replace("\\\n", " ").splitlines():
        if called := re.search(rf"(?:^|[ /])({'|'.join(PROGRAMS)}) (.*)", line):
            words = shlex.split(called[2], comments=True)
            until_pipe = itertools.takewhile(lambda word: word != "|", words)
            arguments = PROGRAMS[called[1]] + list(until_pipe)
            yield from [] if "..." in arguments else [arguments]


@pytest.mark.parametrize("page", pages("", "sh", "console"))
def test_commands_are_accepted(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command line itself, up to where a command would run."""
    ran: list[str] = []

    def execute(options: Options, config: ConfigArguments | None = None) -> None:
        ran.append(type(options).__name__)
        if config is not None:
            path = config.path
            assert path is None or not path.startswith("configs/") or (ROOT / path).exists()
            ConfigArguments(None, config.overrides).resolve(Config())

    monkeypatch.setattr(cli_commands, "execute", execute, raising=False)
    for name, (kind, _) in COMMANDS.items():
        monkeypatch.setitem(COMMANDS, name, (kind, "commands:execute"))
    monkeypatch.setattr(launch, "launch", lambda _, options: ran.append(type(options).__name__))
    every = [words for language, text in blocks(page) for words in commands(text)]
    for words in every:
        main(words)
    assert len(ran) == len(every)


FIELDS = [*flat(to_json(Config()), ".")]


@pytest.mark.parametrize("page", pages("", "python", "sh", "console"))
def test_fields_that_are_named_exist(page: Path) -> None:
    sections = "|".join(field.name for field in dataclasses.fields(Config))
    names = re.findall(rf"`(?:--config\.)?((?:{sections})\.[a-z][\w.*-]*)", page.read_text("utf-8"))
    for name in {*names} - {"train.en", "train.de"}:
        wanted = name.replace("-", "_")
        assert fnmatch.filter([*FIELDS, *map(parent, FIELDS)], wanted), name


def parent(field: str) -> str:
    return field.rpartition(".")[0]


def test_the_fields_that_a_continued_run_may_change() -> None:
    """The table of docs/resume.md is that of the code."""
    text = (ROOT / "docs/resume.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", text, re.M)
    for sections, fields in rows:
        named = set(re.findall(r"`(\w+)`", fields))
        for section in re.findall(r"`(\w+)`", sections):
            all_fields = dataclasses.fields(getattr(Config(), section))
            free = {field.name for field in all_fields if not field.metadata.get("compared", True)}
            every = {field.name for field in all_fields}
            assert free == (every - named if fields.startswith("all") else named), section
