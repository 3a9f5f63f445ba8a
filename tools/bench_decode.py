"""Measures decoding beside CTranslate2 and Hugging Face, and writes results/decode.json and .svg.

    python -m tools.bench_decode --run RUN --data FOLDER --peers PYTHON [--before FOLDER RUN]

RUN is a run of `studies.first_recipe`, whose attention CTranslate2 has, too; it is trained if it
is not there. FOLDER is that of Multi30k, PYTHON the interpreter of an environment with ctranslate2,
torch and transformers. Models of the preset `tiny` with random parameters decode the sources of
test_2016_flickr with given lengths (the loop), and the trained model translates them (real work).
All take turns, in processes that stay. `--before`: a checkout of another commit, and a run that it
can read, whose `translate` is timed as well.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.decode_child import MODEL, random_model
from tools.decode_peers import batches
from tools.studies import first_recipe
from transformer_jax import plot, train
from transformer_jax.allocator import ALLOCATOR
from transformer_jax.benchmark import results
from transformer_jax.cli.main import main as command
from transformer_jax.decoding.evaluation import score
from transformer_jax.files import AnyPath
from transformer_jax.interop import ctranslate2
from transformer_jax.models.make import abstract_params
from transformer_jax.runs import run
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import EOS
from transformer_jax.text.corpus import Corpus

MODES = {"beam5": 5, "greedy": 1}
BATCHES = (25, 50, 100, 250, 1000)
TURNS = 5
TRIES = 20
"""Number of times that a product is measured; the best counts."""
ALLOCATORS = {"default": "", "tuned": ALLOCATOR}
STOPPING = {"optimal": False, "early": True}
"""Values of `decode.early_stopping`."""
BEAMS = (1, 4, 5, 10)


PROGRAM = """
try:
    from transformer_jax.cli.main import main
except ImportError:  # older commits
    from transformer_jax.cli import main
main()
"""


class Process:
    """A process that answers tasks, one at a time."""

    def __init__(self, command: Sequence[str], allocator: str, **start: Any) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"GLIBC_TUNABLES": allocator, "OMP_NUM_THREADS": "2"},
        )
        self.version = self("start", **start)

    def __call__(self, task: str, **options: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"task": task} | options) + "\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"{self._process.args}: ended")
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


Candidates = dict[str, dict[str, Process]]
"""Processes of each program, by their settings."""


def loop(candidates: Candidates, data: Path, count: int) -> dict[str, Any]:
    """Compares the programs at their best batch sizes and settings."""
    found: dict[str, Any] = {name: {} for name in ("sweep", "best", "turns", "sentences_per_s")}
    for mode, beam in MODES.items():
        best: dict[str, tuple[str, int]] = {}
        for name, processes in candidates.items():
            options = {"warm": True} if name == "ours" else {}
            rates = {
                (setting, batch): count / _loop_seconds(process, data, beam, batch, options)
                for (setting, process), batch in itertools.product(processes.items(), BATCHES)
            }
            best[name] = max(rates, key=rates.__getitem__)
            sweep = found["sweep"].setdefault(mode, {}).setdefault(name, {})
            for (setting, batch), rate in rates.items():
                sweep.setdefault(setting, {})[str(batch)] = rate
            _say(f"{mode} {name}: {best[name]}, {rates[best[name]]:.0f} sentences a second")
        turns: dict[str, list[float]] = {name: [] for name in candidates}
        for _, name in itertools.product(range(TURNS), candidates):
            setting, batch = best[name]
            task = {"data": str(data), "beam": beam, "batch": batch}
            turns[name].append(count / candidates[name][setting]("loop", **task)["seconds"])
        found["best"][mode] = {n: {"setting": s, "batch": b} for n, (s, b) in best.items()}
        found["turns"][mode] = turns
        found["sentences_per_s"][mode] = {n: statistics.median(t) for n, t in turns.items()}
        for peer in candidates.keys() - {"ours"}:
            ratios = found.setdefault(f"ratio_to_{peer}", {})
            ratios[mode] = _quartiles(
                a / b for a, b in zip(turns["ours"], turns[peer], strict=True)
            )
    return found


def _loop_seconds(
    process: Process, data: Path, beam: int, batch: int, options: dict[str, Any]
) -> float:
    task = {"data": str(data), "beam": beam, "batch": batch}
    return process("loop", **task, **options)["seconds"]


def floor(
    ours: Process, torch: Process, rows: Sequence[Any], vocabulary: int, beam: int, batch: int
) -> dict[str, Any]:
    """Returns the least time of the matrix products of the loop, and each kind's share.

    The rate of a kind of product is the better one of XLA and PyTorch, at the median batch.
    """
    groups = list(batches(rows, batch))
    kinds = [_products(len(b), len(b[-1]), n, vocabulary, beam) for b, n in groups]
    middle = kinds[len(kinds) // 2]
    shapes = [shape for shape, _ in middle.values()]
    times = [worker("products", shapes=shapes, tries=TRIES) for worker in (ours, torch)]
    seconds = {}
    for kind, (shape, _), *pair in zip(middle, middle.values(), *times, strict=True):
        rate = np.prod(shape) / min(pair)
        seconds[kind] = sum(float(np.prod(k[kind][0])) * k[kind][1] for k in kinds) / rate
    return {"seconds": sum(seconds.values()), "by_kind": seconds}


def _products(
    rows: int, width: int, length: int, vocabulary: int, beam: int
) -> dict[str, tuple[tuple[int, int, int, int], int]]:
    """Returns the shape [B, M, K] x [B, K, N] of each kind of product and their number.

    Outputs attend to half their length on average.
    """
    d, f, heads, layers = MODEL.d_model, MODEL.d_ff, MODEL.heads, MODEL.layers
    source, live, head = rows * width, rows * beam, d // heads
    every = layers * length
    half = max(length // 2, 1)
    return {
        "encoder projections": ((1, source, d, d), 4 * layers),
        "encoder scores": ((rows * heads, width, head, width), layers),
        "encoder values": ((rows * heads, width, width, head), layers),
        "encoder hidden": ((1, source, d, f), layers),
        "encoder output": ((1, source, f, d), layers),
        "memory projections": ((1, source, d, d), 2 * layers),
        "step projections": ((1, live, d, d), 6 * every),
        "step self scores": ((live * heads, 1, head, half), every),
        "step self values": ((live * heads, 1, half, head), every),
        "step cross scores": ((rows * heads, beam, head, width), every),
        "step cross values": ((rows * heads, beam, width, head), every),
        "step hidden": ((1, live, d, f), every),
        "step output": ((1, live, f, d), every),
        "logits": ((1, live, d, vocabulary), length),
    }


def breakdown(
    ours: Process, found: dict[str, Any], rows: int, width: int, length: int, size: int, beam: int
) -> dict[str, float]:
    """Returns where the time of a step goes, in milliseconds, for one batch alone."""
    task = {"vocabulary": size, "beam": beam, "rows": rows}
    whole = ours("one_batch", **task, width=width, length=length) / length * 1e3
    parts = ours("parts", **task, length=length)
    parts["products"] = found["seconds"] * 1e3
    parts["rest"] = whole - sum(parts.values())
    return {"step_ms": whole} | parts


def growth(ours: Process, vocabulary: int) -> dict[str, Any]:
    """Returns the time of one batch by beam, by length and by batch size, for `plot.lines`."""
    usual = {"beam": 5, "rows": 25, "length": 24, "width": 24, "vocabulary": vocabulary}
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for title, name, values in (
        ("beam size", "beam", (1, 4, 16)),
        ("length", "length", (8, 32, 128)),
        ("sentences", "rows", (1, 16, 256)),
    ):
        points = [(v, ours("one_batch", **usual | {name: v}) * 1e3) for v in values]
        panels[f"ms by {title}"] = {"": points}
    return {"panels": panels, "x": "", "xscale": "log", "yscale": "log"}


def real(
    ours: Process, peers: Candidates, loaded: Run, source: Path, references: Sequence[str]
) -> dict[str, Any]:
    """Compares the translation of text with a trained model, start-up apart."""
    found: dict[str, Any] = {name: {} for name in ("best", "sentences_per_s", "bleu", "same_text")}
    tokenizer = str(loaded.folder / "tokenizer.model")
    for mode, beam in MODES.items():
        tasks: dict[str, Callable[[], Any]] = {}
        for stop, early in STOPPING.items():
            own = {"folder": str(loaded.folder), "source": str(source), "beam": beam}
            tasks[stop] = partial(ours, "text", **own, early=early)
            tasks[stop]()  # which compiles
        for name, processes in peers.items():
            task = {"tokenizer": tokenizer, "source": str(source), "beam": beam}
            tries = {
                (setting, batch): partial(process, "text", **task, batch=batch)
                for (setting, process), batch in itertools.product(processes.items(), BATCHES)
            }
            times = {key: translate()["seconds"] for key, translate in tries.items()}
            best = min(times, key=times.__getitem__)
            found["best"].setdefault(mode, {})[name] = {"setting": best[0], "batch": best[1]}
            tasks[name] = tries[best]
        turns: dict[str, list[float]] = {name: [] for name in tasks}
        outputs: dict[str, list[str]] = {}
        for _, (name, translate) in itertools.product(range(TURNS), tasks.items()):
            answer = translate()
            turns[name].append(answer["seconds"])
            outputs[name] = answer["outputs"]
        count = len(references)
        found["sentences_per_s"][mode] = {n: count / statistics.median(t) for n, t in turns.items()}
        found["bleu"][mode] = {n: score(o, references)["bleu"] for n, o in outputs.items()}
        for peer in peers:
            pairs = zip(outputs["early"], outputs[peer], strict=True)
            found["same_text"].setdefault(mode, {})[peer] = sum(a == b for a, b in pairs) / count
            ratios = found.setdefault(f"ratio_to_{peer}", {})
            ratios[mode] = {
                stop: _quartiles(b / a for a, b in zip(turns[stop], turns[peer], strict=True))
                for stop in STOPPING
            }
            _say(f"real {mode}: {ratios[mode]} of {peer}")
    return found


def beams(loaded: Run, data: Path) -> list[dict[str, Any]]:
    """Returns the scores on val by beam size, as `evaluate` prints them."""
    corpus = f"--data={data}/val.en.gz,{data}/val.de.gz"
    sizes = ",".join(map(str, BEAMS))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        command(["evaluate", f"--run={loaded.folder}", corpus, f"--beam={sizes}", "--json"])
    names = ("bleu", "chrf", "length_ratio")  # speeds include compilation
    records = map(json.loads, printed.getvalue().splitlines())
    return [{"beam": r["search"]["beam"]} | {name: r[name] for name in names} for r in records]


def int8(ours: Process, loaded: Run, data: Path, folder: Path) -> dict[str, Any]:
    """Compares the trained model with its int8 export: bytes, BLEU on val, speed."""
    exported = folder / "int8"
    command(["export", f"--run={loaded.folder}", "--format=int8", f"--out={exported}"])
    sources, references = _corpus(data, "val")
    source = _write(folder / "val.txt", sources)
    found: dict[str, Any] = {"seconds": {"float32": [], "int8": []}, "bleu": {}, "bytes": {}}
    folders = {"float32": str(loaded.folder), "int8": str(exported)}
    for turn, (name, path) in itertools.product(range(TURNS + 1), folders.items()):
        task = {"folder": path, "source": str(source), "beam": 5, "early": False}
        answer = ours("text", **task)
        if turn == 0:  # which compiles
            found["bleu"][name] = score(answer["outputs"], references)["bleu"]
            found["bytes"][name] = ours("memory", folder=path, beam=5, rows=32, width=24)
        else:
            found["seconds"][name].append(answer["seconds"])
    found["seconds"] = {n: statistics.median(t) for n, t in found["seconds"].items()}
    sizes = found["bytes"]
    found["ratio_of_bytes"] = sizes["int8"]["parameters"] / sizes["float32"]["parameters"]
    return found


def whole_commands(loaded: Run, source: Path, before: Sequence[str] | None) -> dict[str, Any]:
    """Times `translate` as a user waits for it: with empty caches, and with cached programs."""
    found: dict[str, Any] = {}
    line = _write(source.with_name("one.txt"), source.read_text("utf-8").splitlines()[:1])
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as old_cache:
        for mode, beam in MODES.items():
            ours = _command(Path.cwd(), loaded.folder, source, beam)
            theirs = _command(Path(before[0]), Path(before[1]), source, beam) if before else None
            times: dict[str, list[float]] = {"cold": [_seconds(ours, f"{cache}/{mode}")]}
            times |= {"cached": [], "before": []}
            if theirs:
                _seconds(theirs, old_cache)
            for _ in range(3):
                times["cached"].append(_seconds(ours, f"{cache}/{mode}"))
                if theirs:
                    times["before"].append(_seconds(theirs, old_cache))
            found[mode] = {n: statistics.median(t) for n, t in times.items() if t}
        first = _command(Path.cwd(), loaded.folder, line, 5)
        _seconds(first, f"{cache}/first")
        modules = [sys.executable, "-c", "import transformer_jax.cli.translate"]
        times = {"first_output": [], "imports": []}
        for _ in range(5):
            times["first_output"].append(_seconds(first, f"{cache}/first"))
            times["imports"].append(_seconds((modules, Path.cwd()), cache))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    found["first_output"] = medians["first_output"]
    found["first_output_without_imports"] = medians["first_output"] - medians["imports"]
    if before:
        found["cached_to_before"] = {m: found[m]["cached"] / found[m]["before"] for m in MODES}
    return found


def _command(checkout: Path, folder: AnyPath, source: Path, beam: int) -> tuple[list[str], Path]:
    options = [f"--run={Path(folder).resolve()}", f"--input={source.resolve()}", f"--beam={beam}"]
    return [sys.executable, "-c", PROGRAM, "translate", *options], checkout


def _seconds(command: tuple[list[str], Path], cache: str) -> float:
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    environment |= {"XDG_CACHE_HOME": cache, "PYTHONPATH": str(command[1])}
    began = time.perf_counter()
    subprocess.run(
        command[0], cwd=command[1], env=environment, check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - began


def _quartiles(values: Iterator[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(list(values), n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}


def _say(text: str) -> None:
    print(text, flush=True)


def prepare(loaded: Run, data: Path, folder: Path) -> tuple[Path, Path, list[str], int]:
    """Writes the sources, the rows of the loop and the models of CTranslate2."""
    sources, references = _corpus(data, "test_2016_flickr")
    source = _write(folder / "source.txt", sources)
    tokenizer = loaded.tokenizers.source
    rows = sorted((tokenizer.encode(line) for line in sources), key=len)
    given = {
        "ids": [[*row, EOS] for row in rows],
        # CTranslate2 adds the end symbol, which does not count for the lengths that it is given.
        "pieces": [tokenizer.pieces(row) for row in rows],
        "vocabulary": tokenizer.size,
    }
    (folder / "rows.json").write_text(json.dumps(given), "utf-8")
    _, params = random_model(tokenizer.size)
    ctranslate2.export(MODEL, loaded.tokenizers, params, folder / "random")
    sizes = tokenizer.size, loaded.tokenizers.target.size
    trained = loaded.params(None, abstract_params(loaded.config.model, *sizes))
    ctranslate2.export(loaded.config.model, loaded.tokenizers, trained, folder / "trained")
    return source, folder / "rows.json", references, tokenizer.size


def _corpus(data: Path, name: str) -> tuple[list[str], list[str]]:
    sources, references = zip(
        *Corpus(f"{data}/{name}.en.gz,{data}/{name}.de.gz").pairs(), strict=True
    )
    return list(sources), list(references)


def _write(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return path


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns all results."""
    loaded = run.load(options.run)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        source, data, references, size = prepare(loaded, options.data, folder)

        def begin(command: Sequence[str], allocator: str, **start: Any) -> Process:
            process = Process(command, allocator, **start)
            stack.callback(process.close)
            return process

        peer = [options.peers, "tools/decode_peers.py"]
        own = [sys.executable, "-m", "tools.decode_child"]
        model = {"layers": MODEL.layers, "heads": MODEL.heads, "d_ff": MODEL.d_ff}
        model |= {"vocabulary": size, "d_model": MODEL.d_model}
        peers = {
            "ctranslate2": ("ctranslate2", {"model": str(folder / "random")}),
            "ctranslate2_workers": ("ctranslate2", {"model": str(folder / "random"), "workers": 2}),
            "hf_generate": ("hf", model),
        }
        candidates: Candidates = {"ours": {n: begin(own, a) for n, a in ALLOCATORS.items()}}
        for name, (kind, start) in peers.items():
            candidates[name] = {n: begin([*peer, kind], a, **start) for n, a in ALLOCATORS.items()}
        ours, torch = candidates["ours"]["tuned"], candidates["hf_generate"]["default"]
        rows = json.loads(data.read_text())
        found: dict[str, Any] = {"loop": loop(candidates, data, len(references))}
        looped, steps = found["loop"], {}
        for mode, beam in MODES.items():
            batch = looped["best"][mode]["ours"]["batch"]
            least = floor(ours, torch, rows["ids"], size, beam, batch)
            rate = len(references) / least["seconds"]
            looped.setdefault("ratio_to_floor", {})[mode] = (
                looped["sentences_per_s"][mode]["ours"] / rate
            )
            looped.setdefault("floor_seconds", {})[mode] = least["by_kind"]
            one = [rows["ids"][500][:24]] * 25
            products = floor(ours, torch, one, size, beam, 25)["by_kind"]
            length = next(n for _, n in batches(one, 25))
            step = {k: v for k, v in products.items() if k.startswith(("step", "logits"))}
            least = {"seconds": sum(step.values()) / length}
            width = len(one[0])
            steps[mode] = breakdown(ours, least, 25, width, length, size, beam)
        found["step_ms"] = steps
        found["curves"] = growth(ours, size)
        trained: Candidates = {
            name: {
                n: begin([*peer, "ctranslate2"], a, model=str(folder / "trained"), workers=workers)
                for n, a in ALLOCATORS.items()
            }
            for name, workers in (("ctranslate2", 1), ("ctranslate2_workers", 2))
        }
        found["real"] = real(ours, trained, loaded, source, references)
        task = {"folder": str(loaded.folder), "source": str(source)}
        found["latency"] = {m: ours("latency", **task, beam=b, count=100) for m, b in MODES.items()}
        found["differing"] = {
            mode: ours("differing", **task, beam=beam, sizes=(4096, 512))
            for mode, beam in MODES.items()
        }
        found["beams"] = beams(loaded, options.data)
        found["int8"] = int8(ours, loaded, options.data, folder)
        found["real"]["seconds"] = whole_commands(loaded, source, options.before)
        found["versions_of_peers"] = {
            name: next(iter(processes.values())).version for name, processes in candidates.items()
        }
    found["model"] = dataclasses.asdict(MODEL)
    return found


def main() -> None:
    """Reads the options, measures, and writes the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peers", required=True)
    parser.add_argument("--before", nargs=2)
    options = parser.parse_args()
    train(first_recipe(options.data), options.run)  # at once, where it has been trained
    found = measure(options)
    print(results.write("decode", "make bench-decode", found))
    plot.save(plot.lines(**found["curves"]), results.FOLDER / "decode.svg")


if __name__ == "__main__":
    main()
