"""Trains the runs of a study, several at a time, and writes a row for each.

A row is written as soon as its run is trained, and holds the card of that run, the commit and the
machine. The same call keeps the rows whose cards name this config, these data and these versions,
and continues other runs.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from tools.common import config_file
from transformer_jax.benchmark import results
from transformer_jax.config import Config, from_json
from transformer_jax.errors import UserError
from transformer_jax.runs import run
from transformer_jax.runs.run import Run
from transformer_jax.text.corpus import Corpora

Rows = dict[str, dict[str, Any]]


def study(
    name: str,
    configs: dict[str, Config],
    measure: Callable[[str, Run], dict[str, Any]],
    summarize: Callable[[Rows], dict[str, Any]],
    folder: Path,
    only: Collection[str] = (),
) -> Rows:
    """Trains and measures each config, and writes results/NAME.json with their rows.

    `measure` returns the row of a run, with its card; `summarize` returns what else the file holds
    once all rows are there. only: the runs to train now, while all other rows are kept; empty: all.
    SystemExit: a training has failed, or there is no such run.
    """
    if unknown := set(only) - configs.keys():
        sys.exit(f"--only {' '.join(sorted(unknown))}: unknown; known are {', '.join(configs)}")
    command = f"make {name.replace('_', '-')}"
    rows = kept(name, configs, only)
    missing = {label: config for label, config in configs.items() if label not in rows}
    chosen = {label: config for label, config in missing.items() if label in (only or missing)}
    for label, trained in train_each(chosen, folder):
        rows[label] = results.origin() | measure(label, trained)
        print(results.write(name, command, {"rows": _in_order(rows, configs)}))
    rows = _in_order(rows, configs)
    if rows.keys() == configs.keys():
        print(results.write(name, command, {**summarize(rows), "rows": rows}))
    return rows


def arguments(description: str | None) -> argparse.Namespace:
    """Returns --data, the folder of the corpora, and --only, the runs to train now."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[], metavar="RUN", help="default: all")
    return parser.parse_args()


def kept(name: str, configs: dict[str, Config], only: Collection[str] = ()) -> Rows:
    """Returns the rows of results/NAME.json that training would give again, and those that are not
    to be trained now."""
    if not (results.FOLDER / f"{name}.json").exists():
        return {}
    rows = results.read(name).get("rows", {})
    others = rows.keys() - {*only} if only else set[str]()
    return {
        label: rows[label]
        for label in rows.keys() & configs
        if label in others or _same(rows, label, configs)
    }


def _same(rows: Rows, label: str, configs: dict[str, Config]) -> bool:
    """Returns whether the card of a row is that of the config, with these data and versions.

    The data may be in another folder.
    """
    card, config = rows[label]["card"], configs[label]
    stored, provenance = from_json(card["config"]), card["provenance"]
    names = {"train": stored.data.train, "dev": stored.data.dev, "cache": ""}
    try:
        digests = Corpora.of(config.data).digests()
    except (OSError, UserError):  # a corpus that an earlier call has made is not there any more
        return False
    return (
        stored == replace(config, data=replace(config.data, **names))
        and _by_part(provenance["data_digests"]) == _by_part(digests)
        and provenance["versions"] == run.versions()
    )


def _by_part(digests: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    return {part: list(found.values()) for part, found in digests.items()}


def _in_order(rows: Rows, configs: dict[str, Config]) -> Rows:
    return {label: rows[label] for label in configs if label in rows}


def train_each(configs: dict[str, Config], folder: Path) -> Iterator[tuple[str, Run]]:
    """Trains each config in `folder`/NAME, with a log beside it, and yields the runs as they end.

    On a CPU each run has one core, or more if there are fewer runs than cores: it is slower on one
    than on two, but two runs side by side are faster than one after the other. On an accelerator
    one run follows the other. After SIGINT or SIGTERM each run is saved. SystemExit: a training has
    failed.
    """
    # This process measures a run on the same GPU while the next one is trained.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    folder.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    running: dict[str, subprocess.Popen[bytes]] = {}

    def train(name: str) -> str:
        path = config_file(configs[name], folder / f"{name}.py")
        command = (sys.executable, "-m", "transformer_jax.cli.main", "train", f"--config={path}")
        with (folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen((*command, f"--run={folder / name}"), stdout=log, stderr=log)
            running[name] = process
            if status := process.wait():
                sys.exit(f"{folder / name}.log: training ended with status {status}")
        return name

    places = queue.SimpleQueue[set[int]]()
    for cores in _places(len(configs)):
        places.put(cores)
    with ThreadPoolExecutor(places.qsize(), initializer=_pin, initargs=(places,)) as pool:
        try:
            for future in as_completed([pool.submit(train, name) for name in configs]):
                yield future.result(), run.load(folder / future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running.values():
                process.terminate()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def _places(runs: int) -> list[set[int]]:
    """Returns the cores of each of at most `runs` runs that are trained at the same time."""
    cores = sorted(os.sched_getaffinity(0))
    count = max(1, min(runs, len(cores))) if jax.default_backend() == "cpu" else 1
    return [{*cores[i::count]} for i in range(count)]


def _pin(places: queue.SimpleQueue[set[int]]) -> None:
    """Pins this thread, and the processes that it starts, to the cores of one of the places."""
    os.sched_setaffinity(0, places.get())
