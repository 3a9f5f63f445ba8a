"""Runs a study: trains its configs, scores them, keeps the rows, and draws them.

A row is written to results/NAME.json as soon as its run is trained, and holds the card of that run,
the commit and the machine. The same call keeps the rows whose cards name this config, these data
and these versions, and continues other runs.
"""

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure

from tools.common import CLI, config_file
from tools.scores import Data, Scored, translations
from transformer_jax import plot
from transformer_jax.benchmark import results
from transformer_jax.config import Config, from_json, load_config_file, to_json
from transformer_jax.errors import UserError
from transformer_jax.files import write_whole
from transformer_jax.runs import run
from transformer_jax.runs.card import Card
from transformer_jax.runs.run import Run
from transformer_jax.text.corpus import Corpora

Rows = dict[str, dict[str, Any]]
"""What is known of each run, by its label."""

Changes = Mapping[str, Any]
"""Values of the config, by the names of fields such as "model.layers"."""

RUNS = Path("runs")


@dataclass(frozen=True)
class Study:
    """Runs that differ in some fields of a config, and what is measured of them."""

    about: str
    data: Data
    rows: Mapping[str, Changes]
    """The changes of each run to `config` and `base`, by label. The only run may have the label "":
    the result file then holds its row and nothing else."""
    base: Changes = field(default_factory=dict)
    score: Callable[[Run, Data], Scored] = translations
    """Returns the row of a run, with its card, and its translations by set."""
    config: str = "configs/multi30k_en_de.py"
    keep_outputs: bool = False
    """Whether the translations are written to results/, too."""
    prepare: Callable[[Data], None] = lambda _: None
    """Writes the corpora that the study itself makes."""
    before: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    """Commands of `transformer-jax` that precede the training of a run, by label."""
    summarize: Callable[[Rows, Data], dict[str, Any]] = lambda _, __: {}
    """Returns what the result file holds besides the rows, once all are there."""
    draw: Callable[[Rows], Figure] | None = None

    def configs(self) -> dict[str, Config]:
        """Returns the config of each run."""
        config, data = load_config_file(self.config), self.data
        names = {"data.train": [data.name(data.train)], "data.dev": [data.name(data.dev)]}
        base = {**names, **self.base}
        return {label: changed(config, {**base, **row}) for label, row in self.rows.items()}


def changed(config: Config, changes: Changes) -> Config:
    """Returns the config with other values of some fields."""
    values = to_json(config)
    for name, value in changes.items():
        *sections, last = name.split(".")
        reduce(getitem, sections, values)[last] = value
    return from_json(values)


def run_study(name: str, study: Study, only: Collection[str] = ()) -> None:
    """Trains and scores each run, and writes results/NAME.json with their rows.

    only: the runs to train now, while all other rows are kept; empty: all. SystemExit: a training
    has failed, or there is no such run.
    """
    if unknown := set(only) - study.rows.keys():
        sys.exit(f"--only {' '.join(sorted(unknown))}: unknown; known are {', '.join(study.rows)}")
    results.FOLDER.mkdir(exist_ok=True)
    study.prepare(study.data)
    configs = study.configs()
    rows = kept(name, configs, only)
    missing = [label for label in configs if label not in rows and label in (only or configs)]
    for label, trained in train_each({n: configs[n] for n in missing}, RUNS / name, study.before):
        values, outputs = study.score(trained, study.data)
        rows[label] = results.origin() | values
        for part, lines in outputs.items() if study.keep_outputs else ():
            write_whole(outputs_file(name, label, part), "".join(f"{line}\n" for line in lines))
        rows = {label: rows[label] for label in configs if label in rows}
        _write(name, rows)
    if rows.keys() == configs.keys():
        _write(name, rows, study.summarize(rows, study.data))
        if study.draw is not None:
            plot.save(study.draw(rows), results.FOLDER / f"{name}.svg")


def outputs_file(name: str, label: str, part: str) -> Path:
    """Returns the file of the translations of a set by a run."""
    return results.FOLDER / ".".join(filter(None, (name, label, part, "txt")))


def write_rows(path: Path, rows: Iterable[Iterable[str]]) -> None:
    """Writes a corpus, a pair a line. The lines of one side are rows of one text.

    A tab within a text, as in line 7,366 of Multi30k's training data, is written as a space.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ("\t".join(text.replace("\t", " ") for text in row) for row in rows)
    write_whole(path, "".join(f"{line}\n" for line in lines))


def _write(name: str, rows: Rows, summary: Mapping[str, Any] = {}) -> None:
    values = rows.get("", {**summary, "rows": rows})
    print(results.write(name, f"make study NAME={name}", values))


def kept(name: str, configs: dict[str, Config], only: Collection[str] = ()) -> Rows:
    """Returns the rows of results/NAME.json that training would give again, and those that are not
    to be trained now. The only run of a study is always trained, or continued."""
    if not (results.FOLDER / f"{name}.json").exists():
        return {}
    rows = results.read(name).get("rows", {})
    return {
        label: rows[label]
        for label, config in configs.items()
        if label in rows and ((only and label not in only) or _same(rows[label], config))
    }


def _same(row: dict[str, Any], config: Config) -> bool:
    """Returns whether the card of a row is that of the config, with these data and versions.

    The data may be in another folder.
    """
    if "card" not in row:
        return False
    card = Card("", from_json(row["card"]["config"]), row["card"]["provenance"])
    data = replace(config.data, train=card.config.data.train, dev=card.config.data.dev, cache="")
    try:
        card.require_versions()
        card.require_data(Corpora.of(config.data))
    except UserError:  # or a corpus that an earlier call has made is not there any more
        return False
    return card.config == replace(config, data=data)


def train_each(
    configs: dict[str, Config], folder: Path, before: Mapping[str, Sequence[Sequence[str]]] = {}
) -> Iterator[tuple[str, Run]]:
    """Trains each config in `folder`/LABEL, with a log beside it, and yields the runs as they end.

    On a CPU each run has one core, or more if there are fewer runs than cores: it is slower on one
    than on two, but two runs side by side are faster than one after the other. On an accelerator
    one run follows the other. After SIGINT or SIGTERM each run is saved. SystemExit: a training has
    failed.
    """
    # This process scores a run on the same GPU while the next one is trained.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    old_handler = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    running: dict[str, subprocess.Popen[bytes]] = {}

    def train(label: str) -> str:
        path = folder / label
        path.parent.mkdir(parents=True, exist_ok=True)
        config = config_file(configs[label], Path(f"{path}.py"))
        print(f"{path}: training; its log is {path}.log", flush=True)
        # A run that has begun was preceded by these commands.
        commands = [] if run.exists(path) else list(before.get(label, ()))
        for command in (*commands, ("train", f"--config={config}", f"--run={path}")):
            with Path(f"{path}.log").open("ab") as log:
                process = subprocess.Popen([*CLI, *command], stdout=log, stderr=log)
            running[label] = process
            if status := process.wait():
                sys.exit(f"{log.name}: {command[0]} ended with status {status}")
        return label

    places = queue.SimpleQueue[set[int]]()
    for cores in _places(len(configs)):
        places.put(cores)

    def pin() -> None:
        """Gives this thread, and the processes that it starts, the cores of one of the places."""
        os.sched_setaffinity(0, places.get())

    with ThreadPoolExecutor(places.qsize(), initializer=pin) as pool:
        try:
            for future in as_completed([pool.submit(train, label) for label in configs]):
                yield future.result(), run.load(folder / future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running.values():
                process.terminate()
            raise
        finally:
            signal.signal(signal.SIGTERM, old_handler)


def _places(runs: int) -> list[set[int]]:
    """Returns the cores of each of at most `runs` runs that are trained at the same time."""
    cores = sorted(os.sched_getaffinity(0))
    count = max(1, min(runs, len(cores))) if jax.default_backend() == "cpu" else 1
    return [{*cores[i::count]} for i in range(count)]
