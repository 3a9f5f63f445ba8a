"""Kills, signals and damages runs, and fills their disks.

    python -m tools.faults

Writes results/faults.json. Trains the quickstart's model with dropout, subword sampling and packing
by `transformer-jax train`, with the compiler settings that users have. Every run that was stopped
is continued, and compared with one that was never stopped: SHA-256 of all arrays, metrics,
TensorBoard's scalars. Takes at most forty minutes on two cores. Tests run such cases on a smaller
model.
"""

import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM, Signals
from typing import Any

from tensorboardX.proto import event_pb2

from configs.quickstart import get_config
from tools.common import config_file
from tools.damage import array_digests, damage_campaign
from tools.processes import Fault, finish, start
from transformer_jax.benchmark import results
from transformer_jax.config import Config, to_json
from transformer_jax.runs import checkpoint
from transformer_jax.text.corpus import Corpus
from transformer_jax.training.reporters import read_metrics

FOLDER = Path("runs/faults")
TIMED = ("tokens_per_s", "minutes", "seconds_left", "mfu", "time")
"""Names in records of metrics that depend on time."""

SECONDS = {"saving": 0.4, "training": 0.05, "evaluating": 1.0}
"""About how long the phases take in which runs are killed."""

OPERATIONS = (
    r"open .*/tokenizer\.model",
    r"open .*/\.config\.json",
    r"open .*/training/ocdbt\.process_0/manifest\.ocdbt",
    r"os\.remove .*/commit_success\.txt",
    r"open .*/\.manifest\.json",
    r"os\.rename .*/checkpoints/\d+\.new\d'",
    r"os\.rename .*/checkpoints/\d+\.old",
)
"""Operations on files right before which a run is killed, those of a new run first."""

SIGNALED = {
    "compiling": Fault("training", delay=1.0, compiles=True),
    "training": Fault("training", nth=10, delay=0.05),
    "evaluating": Fault("evaluating", delay=0.5),
    "decoding": Fault("decoding", delay=0.2),
    "saving": Fault("saving", delay=0.2),
    "saving, twice": Fault(r"open .*/\.manifest\.json"),
}
"""When signals arrive. The delays are the longest."""

THIRD_SAVE = r"os\.mkdir .*/checkpoints/00000016\.new"
DISK_FAULTS = {
    "files of at most 0 bytes": Fault(THIRD_SAVE, limit=0),
    "files of at most 20000 bytes": Fault(THIRD_SAVE, limit=20_000),
    "files of at most 200000 bytes": Fault(THIRD_SAVE, limit=200_000),
    "folder of checkpoints is read-only": Fault(THIRD_SAVE, read_only="checkpoints"),
    "run cannot be created": Fault(r"os\.mkdir .*/run'", read_only=".."),
}


@dataclass(frozen=True)
class Case:
    """Faults that come to a run one after the other. Each ends its training with a status and with
    a last line, or all lines on errors, that match `said`."""

    about: dict[str, Any]  # what the results say of it
    faults: list[Fault]
    status: int
    said: str = ".*"


@dataclass(frozen=True)
class Reference:
    """A run that was never stopped, and how others like it are trained."""

    run: Path
    config: Path
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @cached_property
    def outcome(self) -> dict[str, Any]:
        """What others must equal."""
        return outcome(self.run)

    def fresh(self) -> Path:
        """Returns the path of another run."""
        return Path(tempfile.mkdtemp(dir=self.config.parent)) / "run"

    def start(self, run: Path, fault: Fault | None = None) -> subprocess.Popen[str]:
        """Starts or continues another run."""
        arguments = (f"--config={self.config}", f"--run={run}", *self.options)
        return start("train", *arguments, fault=fault, environment=self.environment)

    def train(self, run: Path, fault: Fault | None = None) -> dict[str, Any]:
        """Trains another run. Returns how that ends, and the checkpoints."""
        status, text = finish(self.start(run, fault))
        text = text.replace(str(run.absolute()), "RUN").replace(str(run), "RUN")
        lines = ["", *text.splitlines()]
        errors = "\n".join(line for line in lines if "rror" in line)
        saved = checkpoint.steps(run / "checkpoints")
        return {"status": status, "message": errors or lines[-1], "saved": saved}

    def mismatches(self, run: Path) -> list[str]:
        """Continues another run to its end. Returns in what it differs."""
        end = self.train(run)
        if end["status"]:
            return [end["message"]]
        return [name for name, value in outcome(run).items() if value != self.outcome[name]]

    def interrupt(self, case: Case) -> dict[str, Any]:
        """Trains another run with faults, and continues it. Returns how it has ended the last time,
        with all that is not as promised in "mismatches"."""
        run = self.fresh()
        ends = [self.train(run, fault) for fault in case.faults]
        wrong = [
            f"status {end['status']}: {end['message']}"
            for end in ends
            if end["status"] != case.status or not re.fullmatch(case.said, end["message"])
        ]
        for folder in (run.parent, *run.glob("checkpoints")):  # that may be read-only
            folder.chmod(0o755)
        row = case.about | ends[-1] | {"mismatches": wrong + self.mismatches(run)}
        print(f"{time.strftime('%H:%M:%S')} {row}", flush=True)
        return row


def outcome(run: Path) -> dict[str, Any]:
    """Returns what must not depend on interruptions."""
    folder = run / "checkpoints"
    steps = checkpoint.steps(folder)
    progress = checkpoint.progress(folder, steps[-1])
    del progress["seconds"], progress["sums"]["seconds"]
    records = read_metrics(run / "metrics.jsonl")
    return {
        "steps": steps,
        "best": checkpoint.best_step(folder),
        "arrays": array_digests(folder, steps[-1]),
        "progress": progress,
        "metrics": [{k: v for k, v in r.items() if k not in TIMED} for r in records],
        "scalars": scalars(run / "tensorboard"),
    }


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """Returns the step, name and value of each scalar that TensorBoard shows, as it drops those of
    steps that a continued run repeats, without those that depend on time."""
    shown: list[tuple[int, str, float]] = []
    event_of = vars(event_pb2)["Event"]  # made at run time, unknown to type checkers
    for path in sorted(folder.glob("events.*"), key=lambda p: (p.stat().st_mtime, p.name)):
        data = path.read_bytes()
        # A crash may have truncated the last event.
        while len(data) >= 12 and len(data) >= 16 + (size := struct.unpack("<Q", data[:8])[0]):
            event, data = event_of.FromString(data[12 : 12 + size]), data[16 + size :]
            if event.HasField("session_log") and event.session_log.status == 1:  # START
                shown = [scalar for scalar in shown if scalar[0] < event.step]
            values = [value for value in event.summary.value if value.tag not in TIMED]
            shown += [(event.step, value.tag, value.simple_value) for value in values]
    return sorted(shown)


def kill_case(phase: str, draw: random.Random, process: int | None = None) -> Case:
    """Returns a kill of one process, or of the only one, at a random moment of a phase."""
    nth = draw.randint(2, 12) if phase == "training" else draw.randint(1, 3)
    fault = Fault(phase, nth, draw.uniform(0.01, SECONDS[phase]), process, (SIGKILL,))
    status, said = (137, ".*") if process is None else (1, "(?s).* was ended by SIGKILL; .*")
    return Case({"phase": phase, "process": process}, [fault], status, said)


def signal_case(number: Signals, phase: str, draw: random.Random) -> Case:
    """Returns the arrival of a signal at a random moment of a phase."""
    fault, twice = SIGNALED[phase], phase.endswith("twice")
    delay = fault.delay and draw.uniform(0.01, fault.delay)
    fault = replace(fault, delay=delay, process=0, signals=(number,) * (1 + twice))
    said = "(?!.*stopped by).*" if twice else f"step .*: stopped by {number.name}; .*"
    return Case({"signal": number.name, "phase": phase}, [fault], 128 + number, said)


def make_config(folder: Path) -> Config:
    """Returns the quickstart's config for 40 steps, and writes its corpora to `folder`.

    An epoch ends in the middle of the run; saves, evaluations and records are at different steps.
    """
    pairs = list(Corpus("grammar").pairs())
    short = [pair for pair in pairs[2000:] if len(pair[0].split()) == 7]
    names = {}
    for name, chosen in {"train": pairs[:1600], "dev": short[:100]}.items():
        path = folder / f"{name}.tsv"
        path.write_text("".join(f"{source}\t{target}\n" for source, target in chosen), "utf-8")
        names[name] = (str(path),)
    packed = {"batch_tokens": 1024, "packing": True, "packed_length": 64}
    return get_config().changed(
        tokenizer={"sampling": 0.1},
        data={"cache": str(folder / "cache"), **names, **packed},
        optimizer={"warmup": 20, "decay_steps": 40, "ema": 0.9},
        train={"steps": 40, "evaluate_every": 10, "save_every": 8, "log_every": 7, "keep": 2},
    )


def campaign(config: Config, draw: random.Random) -> dict[str, Any]:
    """Returns the fields of the result file."""
    path = config_file(config, FOLDER / "config.py")
    whole = Reference(FOLDER / "whole", path, ("--tensorboard",))
    two = Reference(FOLDER / "two", path, ("--tensorboard", "--processes=2"))
    victims = {"training": 0, "saving": 1, "evaluating": 0}
    error = "transformer-jax: error: .*(File too large|Permission denied).*"
    numbers = SIGTERM, SIGINT
    cases = {
        "kills": (whole, [kill_case(phase, draw) for phase in 9 * [*SECONDS]]),
        "kills of two": (two, [kill_case(phase, draw, i) for phase, i in victims.items()]),
        "operations": (whole, [Case({}, [Fault(x, signals=(9,)) for x in OPERATIONS], 137)]),
        "signals": (whole, [signal_case(n, p, draw) for n in numbers for p in SIGNALED]),
        "signals of two": (two, [signal_case(n, "training", draw) for n in numbers]),
        "disk": (whole, [Case({"fault": k}, [f], 2, error) for k, f in DISK_FAULTS.items()]),
    }
    with ThreadPoolExecutor(2) as pool:
        print(*pool.map(lambda reference: reference.train(reference.run), (whole, two)))
        rows = {name: [*pool.map(of.interrupt, chosen)] for name, (of, chosen) in cases.items()}
    compared = [row for group in rows.values() for row in group]
    killed = rows["kills"] + rows["kills of two"]
    damage = damage_campaign(whole.run)
    outcomes = Counter(f"{row['kind']}: {row['outcome']}" for row in damage["damaged_files"])
    return {
        "kills": len(killed),
        "kills_by_phase": dict(Counter(row["phase"] for row in killed)),
        "kills_of_two_processes": len(rows["kills of two"]),
        "kills_before_file_operations": len(OPERATIONS),
        "mismatches": sum(bool(row["mismatches"]) for row in compared),
        "runs_compared": len(compared),
        "signals": rows["signals"] + rows["signals of two"],
        "disk_faults": rows["disk"],
        "damaged_files": len(damage["damaged_files"]),
        "damage_outcomes": dict(sorted(outcomes.items())),
        "silent_loads": damage["silent_loads"],
    }


def main() -> None:
    """Runs the campaign and writes the result file."""
    began = time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    for name in ("XLA_FLAGS", "GLIBC_TUNABLES"):
        os.environ.pop(name, None)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(FOLDER.absolute() / "programs")
    config = make_config(FOLDER)
    found = campaign(config, random.Random(0))
    found |= {"minutes": round((time.monotonic() - began) / 60, 1), "config": to_json(config)}
    print(results.write("faults", "make measure NAME=faults", found))
    if found["mismatches"] or found["silent_loads"]:
        sys.exit("not as promised: see mismatches and silent_loads there")


if __name__ == "__main__":
    main()
