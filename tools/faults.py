"""Kills, signals, fills and damages runs, and writes results/faults.json.

    python -m tools.faults [--seed N] [--continue]
    python -m tools.faults --part NAME [--seed N]

Trains a model of quickstart size with dropout, subword sampling and packing by `transformer-jax
train`, with the compiler settings that users have. Every run that was stopped is continued, and
compared with one that was never stopped: SHA-256 of all arrays, metrics, TensorBoard's scalars.
Takes at most forty minutes on two cores: two parts of the campaign run at once, and those that
measure times run alone. `--continue` keeps what an earlier call has finished.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX.proto import event_pb2

from tools import save_stall
from tools.billion_pairs import billion_pairs
from tools.common import config_file
from tools.damage import damage_campaign
from transformer_jax.benchmark import results
from transformer_jax.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
    to_json,
)
from transformer_jax.runs import checkpoint, lock
from transformer_jax.text.corpus import Corpus
from transformer_jax.training.reporters import read_metrics

FOLDER = Path("runs/faults")
STEPS = 40
PHASES = ("training", "saving", "evaluating")
PER_PHASE = {1: 6, 2: 1}
"""Number of kills in each phase, by number of processes."""

WINDOWS = 7
"""Number of operations on files right before which runs are killed."""

PER_RUN = 7
"""Largest number of kills of one run."""

LIMITS = (0, 20_000, 200_000)
"""Largest size of a file in bytes while a disk is full."""

MEASURED = ("save_stall", "billion_pairs")
"""Parts of the campaign that measure times."""

POISONS = ("loss NaN", "loss infinite", "gradient NaN")
TIMED = ("tokens_per_s", "minutes", "seconds_left")
"""Names in records of metrics that depend on time."""


def make_config(folder: Path) -> Config:
    """Returns a config of the size of configs/quickstart.py, and writes its corpora to `folder`.

    An epoch ends in the middle of the run; saves, evaluations and records are at different steps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pairs = list(Corpus("grammar").pairs())
    short = [pair for pair in pairs[2000:] if len(pair[0].split()) == 7][:100]
    for name, chosen in {"train": pairs[:1600], "dev": short}.items():
        lines = [f"{source}\t{target}\n" for source, target in chosen]
        path = folder / f"{name}.tsv"
        if not path.exists():  # another part of the campaign may be reading it
            path.write_text("".join(lines), "utf-8")
    return Config(
        model=ModelConfig(
            layers=2, d_model=128, heads=4, d_ff=256, max_length=64, norm="pre", dropout=0.1
        ),
        tokenizer=TokenizerConfig(vocabulary=2000, sampling=0.1),
        data=DataConfig(
            train=(str(folder / "train.tsv"),),
            dev=(str(folder / "dev.tsv"),),
            batch_tokens=1024,
            packing=True,
            packed_length=64,
            cache=str(folder / "cache"),
        ),
        optimizer=OptimizerConfig(
            schedule="linear", learning_rate=0.003, warmup=20, decay_steps=STEPS, ema=0.9
        ),
        train=TrainConfig(steps=STEPS, evaluate_every=10, save_every=8, log_every=7, keep=2),
        decode=DecodeConfig(beam=1),
    )


# Processes


@dataclass(frozen=True)
class Setting:
    """How runs are trained: folder that holds them, config file, options, environment."""

    folder: Path
    config: Path
    processes: int = 1
    options: tuple[str, ...] = ("--tensorboard",)
    environment: Mapping[str, str] = field(default_factory=lambda: environment())

    def start(self, run: Path, faults: Mapping[str, Any] | None = None) -> Job:
        """Starts or continues a run, with the faults of faults_child.py."""
        arguments = ["train", f"--config={self.config}", f"--run={run}", *self.options]
        arguments += [f"--processes={self.processes}"] if self.processes > 1 else []
        log = self.folder / f"{run.name}.jsonl"
        return Job(arguments, log, self.environment, faults or {})


def environment(**changes: str) -> dict[str, str]:
    """Returns the environment of a user's command, with XLA's default settings and the cache of
    programs below `FOLDER`."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "GLIBC_TUNABLES")}
    return kept | {"XDG_CACHE_HOME": str(FOLDER.absolute() / "user_cache")} | changes


class Job:
    """A command in processes of its own, which write down what they do (see faults_child.py)."""

    def __init__(
        self,
        arguments: list[str],
        log: Path,
        environment: Mapping[str, str],
        faults: Mapping[str, Any],
    ) -> None:
        self._log = log
        self._log.write_bytes(b"")
        faults = {"log": str(log.absolute()), **faults}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.faults_child", *arguments],
            env={**environment, "FAULTS": json.dumps(faults)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,  # a file would be limited in size, too
        )
        self._errors = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                self._errors += line

    def events(self) -> list[dict[str, Any]]:
        """Returns what the processes have written down."""
        lines = self._log.read_text("utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def ended(self) -> bool:
        """Returns whether the command has ended."""
        return self._process.poll() is not None

    def wait_for(self, phase: str, nth: int = 1, process: int = 0) -> bool:
        """Waits until `phase` begins for the `nth` time; False: the command has ended before."""
        while not self.ended():
            if len(_begins(self.events(), phase, process)) >= nth:
                return True
            time.sleep(0.005)
        return False

    def pids(self) -> dict[int, int]:
        """Returns the numbers of the training processes by their index."""
        return {event["process"]: event["pid"] for event in self.events()}

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the command, as a user or a scheduler does."""
        self._process.send_signal(number)

    def kill(self, index: int | None = None) -> None:
        """Sends SIGKILL to training process `index`; None: to all, and to their launcher."""
        if index is not None:
            os.kill(self.pids()[index], signal.SIGKILL)
            return
        self._process.kill()
        for pid in self.pids().values():
            if pid != self._process.pid and not _dead(pid):
                os.kill(pid, signal.SIGKILL)

    def wait(self, timeout: float = 300) -> tuple[int, str]:
        """Waits for the end of all processes.

        Returns the status as a shell does, and the error message or else the last line.
        """
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait()
            print("  killed after", timeout, "seconds:", self.errors()[-2000:], flush=True)
        while not all(map(_dead, self.pids().values())):
            time.sleep(0.01)
        self._reader.join()
        lines = self.errors().replace(f"{FOLDER.absolute()}", str(FOLDER)).strip().splitlines()
        said = [line for line in lines if line.startswith("transformer-jax: error")] or lines
        return status if status >= 0 else 128 - status, said[-1] if said else ""

    def errors(self) -> str:
        """Returns what the command has written to standard error."""
        return self._errors.decode(errors="replace")


def _dead(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def _begins(events: list[dict[str, Any]], phase: str, process: int = 0) -> list[float]:
    return [e["at"] for e in events if _is_of(e, phase, process) and e["begin"]]


def _is_of(event: dict[str, Any], phase: str, process: int) -> bool:
    return event.get("phase") == phase and event["process"] == process


def active(events: list[dict[str, Any]], process: int = 0) -> list[str]:
    """Returns the phases of a process that had begun and not ended at its last event."""
    depth: Counter[str] = Counter()
    for event in events:
        if "phase" in event and event["process"] == process:
            depth[event["phase"]] += 1 if event["begin"] else -1
    return [name for name, number in depth.items() if number > 0 and name != "command"]


def phase_of(names: list[str]) -> str:
    """Returns the phase that describes what was active best."""
    if "training" not in names:
        return "starting"
    order = ("compiling", "evaluating", "saving")
    return next((name for name in order if name in names), "training")


def durations(events: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the median duration of each phase in seconds."""
    found: dict[str, list[float]] = {}
    for phase in ("compiling", "training", "saving", "evaluating", "decoding"):
        ends = [e["at"] for e in events if _is_of(e, phase, 0) and not e["begin"]]
        for begin, end in zip(_begins(events, phase), ends, strict=True):
            found.setdefault(phase, []).append(end - begin)
    return {phase: statistics.median(seconds) for phase, seconds in found.items()}


# Comparisons


def outcome(run: Path) -> dict[str, Any]:
    """Returns what must not depend on interruptions: digests of the arrays of the last checkpoint,
    the progress in the data, metrics, and scalars of TensorBoard."""
    folder = run / "checkpoints"
    steps = checkpoint.steps(folder)
    found: dict[str, Any] = {"steps": steps, "best": checkpoint.best_step(folder)}
    for name in ("weights", "training"):
        digest = hashlib.sha256()
        tree = checkpoint.restore(folder, steps[-1], name)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
            digest.update(np.ascontiguousarray(leaf).tobytes())
        found[name] = digest.hexdigest()
    progress = checkpoint.progress(folder, steps[-1])
    progress.pop("seconds")
    progress["sums"].pop("seconds")
    found["progress"] = progress
    records = read_metrics(run / "metrics.jsonl")
    found["metrics"] = [{k: v for k, v in r.items() if k not in TIMED} for r in records]
    found["scalars"] = scalars(run / "tensorboard")
    return found


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Returns in what two outcomes differ."""
    return [name for name in wanted if found[name] != wanted[name]]


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """Returns the step, name and value of each scalar that TensorBoard shows, as it drops those of
    steps that a continued run repeats, without those that depend on time."""
    shown: list[tuple[int, str, float]] = []
    for path in sorted(folder.glob("events.*"), key=lambda p: (p.stat().st_mtime, p.name)):
        for event in _events(path.read_bytes()):
            if event.HasField("session_log") and event.session_log.status == 1:  # START
                shown = [scalar for scalar in shown if scalar[0] < event.step]
            for value in event.summary.value:
                if value.tag not in TIMED:
                    shown.append((event.step, value.tag, value.simple_value))
    return sorted(shown)


def _events(data: bytes) -> Iterator[Any]:
    """Yields the events of a file; a last one that a crash has truncated is ignored."""
    event = vars(event_pb2)["Event"]  # made at run time, unknown to type checkers
    while len(data) >= 12:
        (size,) = struct.unpack("<Q", data[:8])
        if len(data) < 16 + size:
            return
        yield event.FromString(data[12 : 12 + size])
        data = data[16 + size :]


def contents(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file below a folder, by name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


class Reference:
    """A run that is never stopped, and what others are compared with."""

    def __init__(self, setting: Setting, name: str = "whole") -> None:
        self.setting, self.run = setting, (setting.folder / name).absolute()
        log = setting.folder / f"{name}.json"
        if not log.exists():
            shutil.rmtree(self.run, ignore_errors=True)
            job = setting.start(self.run)
            status, line = job.wait(900)
            if status:
                raise RuntimeError(f"the run that is not stopped fails: {job.errors()}")
            log.write_text(json.dumps(job.events()), "utf-8")
            say(f"{self.run.name}: {line}")
        self.events = json.loads(log.read_text("utf-8"))
        self.durations, self.outcome = durations(self.events), outcome(self.run)

    def fresh(self, name: str) -> Path:
        """Returns the path of a new run."""
        run = (self.setting.folder / name).absolute()
        shutil.rmtree(run, ignore_errors=True)
        return run

    def finish(self, run: Path) -> list[str]:
        """Continues a run to its end. Returns in what it differs from one never stopped."""
        job = self.setting.start(run)
        status, line = job.wait()
        return [f"status {status}: {line}"] if status else differences(outcome(run), self.outcome)


def say(text: str) -> None:
    """Prints a line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


# The campaign


def kills(reference: Reference, each: int, draw: random.Random) -> dict[str, Any]:
    """Kills runs at random moments of training, saving and evaluating, `each` times in each phase.

    With two processes, one of them or both die. Returns every kill and the mismatches of the runs.
    """
    left, done, runs = (
        Counter(dict.fromkeys(PHASES, each)),
        list[dict[str, Any]](),
        list[dict[str, Any]](),
    )
    while left.total() > 0:
        run, here = reference.fresh("killed"), list[dict[str, Any]]()
        while left.total() > 0 and len(here) < PER_RUN:
            phase = draw.choices([*left], [*left.values()])[0]
            kill = kill_in(reference, run, phase, draw)
            if kill is None:
                break
            say(f"killed {kill['processes']} in {kill['phase']} ({', '.join(kill['active'])})")
            here.append(kill | {"run": len(runs)})
            if left[kill["phase"]] > 0:
                left[kill["phase"]] -= 1
            left = +left
        mismatches = reference.finish(run)
        say(f"run {len(runs)} after {len(here)} kills: {mismatches or 'identical'}")
        runs.append({"kills": len(here), "mismatches": mismatches})
        if mismatches:
            run.rename(run.with_name(f"mismatch_{reference.setting.processes}_{len(runs)}"))
        done += here
    return {"kills": done, "runs": runs}


def kill_in(
    reference: Reference, run: Path, phase: str, draw: random.Random
) -> dict[str, Any] | None:
    """Starts or continues a run, and kills it at a random moment of a phase; None: it has ended."""
    count = reference.setting.processes
    index = draw.choice([None, *range(count)]) if count > 1 else None
    nth = draw.randint(1, 3) if phase == "saving" else draw.randint(1, 2)
    seconds = reference.durations[phase]
    first, nth = ("compiling", 1) if phase == "training" else (phase, nth)
    job = reference.setting.start(run)
    if job.wait_for(first, nth):
        if phase == "training":
            while "compiling" in active(job.events()) and not job.ended():
                time.sleep(0.005)
            seconds /= 2
        time.sleep(draw.uniform(0, seconds))
    if job.ended():
        job.wait()
        return None
    at = time.monotonic()
    job.kill(index)
    status, _ = job.wait()
    names = active([event for event in job.events() if event["at"] <= at], index or 0)
    who = "all" if index is None else f"process {index}"
    return {"phase": phase_of(names), "active": names, "processes": who, "status": status}


def windows(reference: Reference, draw: random.Random, most: int) -> dict[str, Any]:
    """Kills runs right before operations on their files, each kind of them once, at most `most`.

    Returns the operations and the mismatches of the runs.
    """
    counts = Counter(e["operation"] for e in reference.events if "operation" in e)
    names = draw.sample([*counts], min(most, len(counts)))
    done, runs = list[str](), list[dict[str, Any]]()
    while names:
        run, here = reference.fresh("windows"), list[str]()
        while names and len(here) < PER_RUN:
            # Operations that only a new run makes come first.
            fresh = [name for name in names if not here and "checkpoints/" not in name]
            name = (fresh or names)[0]
            names.remove(name)
            nth = draw.randint(1, min(counts[name], 3))
            job = reference.setting.start(run, {"kill_at": [name, nth]})
            status, _ = job.wait()
            if status != 128 + signal.SIGKILL:
                # The run has ended without this operation. A new run comes to it.
                names += [name] if here else []
                break
            say(f"killed before {name}")
            here.append(name)
        mismatches = reference.finish(run)
        say(f"windows of run {len(runs)}: {mismatches or 'identical'}")
        runs.append({"kills": len(here), "operations": here, "mismatches": mismatches})
        if mismatches:
            run.rename(run.with_name(f"mismatch_windows_{len(runs)}"))
        done += here
    return {"operations": len(done), "runs": runs}


def signals(reference: Reference, draw: random.Random) -> list[dict[str, Any]]:
    """Sends each signal in each phase. Returns statuses, seconds, and mismatches once continued."""
    found = list[dict[str, Any]]()
    phases = ["compiling", "training", "evaluating", "decoding", "saving", "saving, twice"]
    phases = phases if reference.setting.processes == 1 else ["training"]
    for number in (signal.SIGTERM, signal.SIGINT):
        for phase in phases:
            found.append(signal_in(reference, number, phase, draw))
            say(f"{found[-1]}")
    return found


def signal_in(
    reference: Reference, number: signal.Signals, phase: str, draw: random.Random
) -> dict[str, Any]:
    """Sends a signal at a random moment of a phase, and continues the run."""
    run, setting = reference.fresh("signalled"), reference.setting
    where, twice = phase.partition(",")[0], phase.endswith("twice")
    if where == "compiling":  # a program that is not cached
        cache = setting.folder.absolute() / "empty_cache"
        shutil.rmtree(cache, ignore_errors=True)
        setting = replace(
            setting, environment={**setting.environment, "XDG_CACHE_HOME": str(cache)}
        )
    job = setting.start(run)
    if not job.wait_for(where):
        raise RuntimeError(f"the run has ended before {where}: {job.errors()}")
    if where == "training":  # with steps that are not saved
        while not re.search(r"^step +\d+  epoch", job.errors(), re.M) and not job.ended():
            time.sleep(0.01)
    else:
        time.sleep(draw.uniform(0, reference.durations[where] / 2))
    names, began = active(job.events()), time.monotonic()
    job.signal(number)
    if twice:
        time.sleep(0.5)  # the first one is handled between two steps
        job.signal(number)
    status, line = job.wait()
    found = {
        "signal": number.name,
        "phase": phase,
        "active": names,
        "processes": setting.processes,
        "status": status,
        "seconds": round(time.monotonic() - began, 2),
        "message": line,
        "saved": checkpoint.steps(run / "checkpoints"),
    }
    mismatches = [name for name in reference.finish(run) if name != "steps"]
    return found | {"mismatches": mismatches}  # other steps were saved


def nan_steps(setting: Setting, config: Config) -> list[dict[str, Any]]:
    """Trains on batches of which some have a loss or gradient that is not finite.

    Returns for each kind the steps that were skipped, the arrays that they changed besides the
    step, and how a run ends all of whose batches are such.
    """
    data, options = replace(config.data, dev=()), replace(config.train, steps=20, max_skipped=4)
    path = setting.folder / "poisoned.py"
    poisoned = replace(setting, config=config_file(replace(config, data=data, train=options), path))
    found = list[dict[str, Any]]()
    for kind in POISONS:
        run = (setting.folder / "poisoned").absolute()
        shutil.rmtree(run, ignore_errors=True)
        job = poisoned.start(run, {"poison": [kind, 3]})
        status, line = job.wait()
        skipped = [event for event in job.events() if "changed" in event]
        said = [int(step) for step in re.findall(r"step +(\d+): .*skipped", job.errors())]
        some = {
            "kind": kind,
            "status": status,
            "skipped": [event["step"] for event in skipped],
            "said": said,
            "counted": checkpoint.progress(run / "checkpoints", 20)["sums"]["skipped"],
            "arrays": skipped[0]["arrays"] if skipped else 0,
            "changed": sorted({name for event in skipped for name in event["changed"]}),
        }
        shutil.rmtree(run)
        job = poisoned.start(run, {"poison": [kind, 1]})
        status, line = job.wait()
        steps = checkpoint.steps(run / "checkpoints")
        found.append(some | {"all": {"status": status, "message": line, "saved": steps}})
        say(f"{found[-1]}")
    return found


def disk_faults(reference: Reference) -> list[dict[str, Any]]:
    """Fills the disk, or makes folders read-only, during the third save and before the start."""
    found = list[dict[str, Any]]()
    cases = {f"files of at most {size} bytes": (3, "limit", size) for size in LIMITS}
    cases["folder of checkpoints is read-only"] = (3, "read-only", 0)
    for name, fault in cases.items():
        run = reference.fresh("full")
        job = reference.setting.start(run, {"at_save": fault, "unprivileged": True})
        status, line = job.wait()
        (run / "checkpoints").chmod(0o755)
        whole = [step for step in checkpoint.steps(run / "checkpoints") if _is_whole(run, step)]
        case = {"fault": name, "status": status, "message": line, "whole": whole}
        case["listed"] = checkpoint.steps(run / "checkpoints")
        found.append(case | {"mismatches": reference.finish(run)})
        say(f"{found[-1]}")
    parent = reference.fresh("unwritable")
    parent.mkdir()
    parent.chmod(0o500)
    job = reference.setting.start(parent / "run", {"unprivileged": True})
    status, line = job.wait()
    written = [str(path) for path in parent.rglob("*")]
    found.append({"fault": "run cannot be created", "status": status, "message": line})
    found[-1]["mismatches"] = written
    say(f"{found[-1]}")
    return found


def _is_whole(run: Path, step: int) -> bool:
    for tree in ("weights", "training"):
        checkpoint.restore(run / "checkpoints", step, tree)
    return True


def locks(reference: Reference) -> dict[str, Any]:
    """Trains a run twice at once, kills the first, and does the same without `flock`."""
    run = reference.fresh("locked")
    first = reference.setting.start(run)
    first.wait_for("saving")
    first.signal(signal.SIGSTOP)  # the run would end meanwhile
    other = replace(reference.setting, folder=reference.setting.folder / "second")
    other.folder.mkdir(exist_ok=True)
    status, line = other.start(run).wait()
    found: dict[str, Any] = {"second": {"status": status, "message": line}}
    saves = len(_begins(first.events(), "saving"))
    first.signal(signal.SIGCONT)
    found["second"]["holder_goes_on"] = first.wait_for("saving", saves + 1)
    first.kill()
    first.wait()
    began = time.monotonic()
    with lock.locked(run):
        found["free_after_kill_s"] = round(time.monotonic() - began, 3)
    found["mismatches"] = reference.finish(run)
    say(f"{found}")
    return found | {"without_flock": heartbeats(reference.fresh("beating"))}


def heartbeats(folder: Path) -> dict[str, Any]:
    """Returns how a lock is held on a file system without `flock`: by a process that lives, and by
    one that was killed."""
    code = f"""
import errno, pathlib, sys, time
from transformer_jax.runs import lock
def unsupported(*_):
    raise OSError(errno.ENOLCK, "No locks available")
lock.fcntl.flock = unsupported
with lock.locked(pathlib.Path({str(folder)!r})):
    print("held", flush=True)
    time.sleep(float(sys.argv[1]))
"""

    def hold(seconds: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, str(seconds)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, text=True, env=environment(), stdout=pipe, stderr=pipe)

    def line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    holder = hold(600)
    line(holder)
    began = time.monotonic()
    _, error = hold(0).communicate()
    found: dict[str, Any] = {"refused_after_s": round(time.monotonic() - began, 1)}
    found["message"] = error.strip().splitlines()[-1]
    holder.kill()
    holder.wait()
    began, second = time.monotonic(), hold(0)
    found["taken"] = line(second) == "held"
    found["stale_after_s"] = round(time.monotonic() - began, 1)
    second.communicate()
    say(f"{found}")
    return found


class Campaign:
    """The parts of the campaign. Each has random moments of its own.

    The references are trained once, by the first process that needs them.
    """

    def __init__(self, seed: int) -> None:
        self.config = make_config(FOLDER)
        path = FOLDER / "config.py"
        self.setting = Setting(FOLDER, path if path.exists() else config_file(self.config, path))

        def draw(name: str) -> random.Random:
            return random.Random(f"{seed} {name}")

        self.parts: dict[str, Callable[[], Any]] = {
            "one_process": lambda: kills(self.whole, PER_PHASE[1], draw("one")),
            "signals": lambda: signals(self.whole, draw("signals")),
            "two_processes": lambda: kills(self.two, PER_PHASE[2], draw("two")),
            "windows": lambda: windows(self.begun, draw("windows"), WINDOWS),
            "damage": lambda: damage_campaign(self.whole.run),
            "disk_faults": lambda: disk_faults(self.whole),
            "locks": lambda: locks(self.whole),
            "signals_of_two": lambda: signals(self.two, draw("signals of two")),
            "nan_steps": lambda: nan_steps(self.setting, self.config),
            "save_stall": lambda: save_stall.measure(),
            "billion_pairs": lambda: billion_pairs(),
        }

    @cached_property
    def whole(self) -> Reference:
        """A run of one process."""
        return Reference(self.setting)

    @cached_property
    def two(self) -> Reference:
        """A run of two processes."""
        return Reference(replace(self.setting, folder=_made("two"), processes=2))

    @cached_property
    def begun(self) -> Reference:
        """A run that begins with the parameters of another."""
        options = (*self.setting.options, f"--init-from={self.whole.run}")
        return Reference(replace(self.setting, folder=_made("begun"), options=options))

    def run(self, name: str) -> None:
        """Runs a part, and stores what it has found."""
        say(f"{name}:")
        value = self.parts[name]()
        _found(name).write_text(json.dumps(value), "utf-8")


def _made(name: str) -> Path:
    (FOLDER / name).mkdir(parents=True, exist_ok=True)
    return FOLDER / name


def _found(part: str) -> Path:
    """Returns the file of what a part has found."""
    return _made("parts") / f"{part}.json"


def run_parts(names: Sequence[str], seed: int, at_once: int) -> None:
    """Runs those parts that are not finished, each in a process of its own."""

    def run(name: str) -> None:
        command = [sys.executable, "-m", "tools.faults", f"--part={name}", f"--seed={seed}"]
        subprocess.run(command, check=True)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, [name for name in names if not _found(name).exists()]))


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the result file from what the parts of the campaign have found."""
    signals = [*found["signals"], *found["signals_of_two"]]
    one, two = found["one_process"], found["two_processes"]
    killed = [*one["kills"], *two["kills"]]
    runs = [*one["runs"], *two["runs"], *found["windows"]["runs"]]
    continued = [*runs, *signals, *found["disk_faults"], found["locks"]]
    damage, stall = found["damage"], found["save_stall"]
    outcomes = Counter(f"{row['kind']}: {row['outcome']}" for row in damage["damaged_files"])
    return {
        "kills": len(killed),
        "kills_by_phase": dict(Counter(kill["phase"] for kill in killed)),
        "kills_of_two_processes": len(two["kills"]),
        "kills_before_file_operations": found["windows"]["operations"],
        "mismatches": sum(bool(each["mismatches"]) for each in continued),
        "runs_compared": len(continued),
        "signals": signals,
        "nan_steps": found["nan_steps"],
        "disk_faults": found["disk_faults"],
        "locks": found["locks"],
        "damaged_files": len(damage["damaged_files"]),
        "damage_outcomes": dict(sorted(outcomes.items())),
        "silent_loads": damage["silent_loads"],
        "digest_share_of_save": stall["digest_share_of_save"],
        "digest_share_of_stall": stall["digest_ms_over_step_stall_ms"],
        "step_stall_ms": stall["step_stall_ms"],
        "billion_pairs": found["billion_pairs"],
        "details": {
            "kills": killed,
            "runs": runs,
            "save_stall": found["save_stall"],
        },
    }


def failures(found: dict[str, Any]) -> Iterator[str]:
    """Yields what in the result file breaks a promise."""
    if found["mismatches"]:
        yield f"{found['mismatches']} of {found['runs_compared']} runs differ"
    if found["silent_loads"]:
        yield f"{found['silent_loads']} damaged files are loaded silently"
    for case in found["signals"]:
        if case["status"] != 128 + signal.Signals[case["signal"]]:
            yield f"status {case['status']} after {case['signal']} in {case['phase']}"
        if not _is_as_named(case):
            yield f"{case['signal']} in {case['phase']} is another case: {case}"
    for case in found["nan_steps"]:
        if case["changed"] or not case["skipped"] or case["said"] != case["skipped"]:
            yield f"{case['kind']}: {case}"
        if case["counted"] != len(case["skipped"]) or case["all"]["status"] != 2:
            yield f"{case['kind']}: {case}"
    for case in found["disk_faults"]:
        if case["status"] != 2:
            yield f"status {case['status']}: {case['fault']}"
    second, beating = found["locks"]["second"], found["locks"]["without_flock"]
    if second["status"] != 2 or not second["holder_goes_on"] or not beating["taken"]:
        yield f"locks: {found['locks']}"


def _is_as_named(case: dict[str, Any]) -> bool:
    """Returns whether a signal came in its phase: in training after a step, which is then saved;
    twice before the first one had stopped the run."""
    if case["phase"].endswith("twice"):
        return "stopped by" not in case["message"]
    return case["phase"] != "training" or bool(case["saved"])


def main() -> None:
    """Runs the campaign and writes the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--continue", action="store_true", dest="go_on", help="keep finished parts")
    parser.add_argument("--part", metavar="NAME", help="run this part alone")
    options = parser.parse_args()
    if options.part:
        Campaign(options.seed).run(options.part)
        return
    if not options.go_on:
        shutil.rmtree(FOLDER, ignore_errors=True)
    began = time.monotonic()
    campaign = Campaign(options.seed)
    references = campaign.whole, campaign.two, campaign.begun
    say(f"{len(references)} runs that are not stopped are trained")
    together = [name for name in campaign.parts if name not in MEASURED]
    run_parts(together, options.seed, 2)
    run_parts(MEASURED, options.seed, 1)
    found = {name: json.loads(_found(name).read_text("utf-8")) for name in campaign.parts}
    minutes = round((time.monotonic() - began) / 60, 1)
    values = {"seed": options.seed, "minutes": minutes} | summary(found)
    values["config"] = to_json(campaign.config)
    print(results.write("faults", "make faults", values))
    if broken := list(failures(values)):
        sys.exit("\n".join(broken))


if __name__ == "__main__":
    main()
