"""Compares decoding with CTranslate2 and Hugging Face, and writes results/decode.json and .svg.

    python -m tools.bench_decode [--run RUN] [--data FOLDER] [--peers PYTHON]

RUN is a run of `studies.first_recipe`, whose attention CTranslate2 has, too; it is trained if it
is not there. FOLDER is that of Multi30k, PYTHON the interpreter of an environment with ctranslate2,
sentencepiece, torch and transformers. A model with random parameters decodes the sources of
test_2016_flickr with given lengths, and the trained model translates them. All take turns; peers
run in processes of their own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np

from tools import decode_ours
from tools.decode_ours import MODEL, lines_of, random_search, timed
from tools.decode_peers import batches
from tools.studies import MULTI30K, first_recipe
from transformer_jax import Translator, plot, train
from transformer_jax.allocator import ALLOCATOR, restart_with_allocator
from transformer_jax.benchmark import results
from transformer_jax.cli.main import main as command_line
from transformer_jax.config import DecodeConfig
from transformer_jax.decoding.evaluation import score
from transformer_jax.interop import ctranslate2
from transformer_jax.parallel.program_cache import cache_programs
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import EOS

MODES = {"beam5": 5, "greedy": 1}
BATCHES = (25, 50, 100, 250, 1000)
ALLOCATORS = {"default": "", "tuned": ALLOCATOR}
STOPPING = {"optimal": False, "early": True}
"""Values of `decode.early_stopping`."""
BEAMS = (1, 4, 5, 10)
CURVES = {
    "beam size": ("beam", (1, 4, 16)),
    "length": ("length", (8, 32, 128)),
    "sentences": ("rows", (1, 16, 256)),
}
TURNS = 5
TRIES = 20
"""Number of times that a matmul is measured; the best counts."""

Timed = Callable[..., tuple[float, Any]]
"""Returns the seconds that a call takes, and what it returns."""
Ways = Mapping[str, Timed]
"""Batch sizes and settings of a program, of which the fastest counts."""


@contextmanager
def peer(python: str, *arguments: Any, allocator: str) -> Iterator[Timed]:
    """Starts a process of tools/decode_peers.py that ends with the context. Yields a function that
    calls a method there: (name, **arguments)."""
    with subprocess.Popen(
        [python, "tools/decode_peers.py", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"GLIBC_TUNABLES": allocator, "OMP_NUM_THREADS": "2"},
    ) as process:
        requests, replies = process.stdin, process.stdout
        assert requests is not None and replies is not None

        def call(method: str, **options: Any) -> tuple[float, Any]:
            print(json.dumps([method, options]), file=requests, flush=True)
            if not (reply := replies.readline()):
                raise RuntimeError(f"{process.args}: ended")
            seconds, answer = json.loads(reply)
            return seconds, answer

        yield call


def compare(programs: Mapping[str, Ways]) -> tuple[dict[str, str], dict[str, list[float]], Any]:
    """Returns the fastest way of each program, its seconds in turns, and what it returns.

    Each way is called twice to choose among them, since the first call may compile.
    """
    best = {}
    for name, ways in programs.items():
        for way in ways.values():
            way()
        best[name] = min(ways, key=lambda label: ways[label]()[0])
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    answers = {}
    for _, (name, label) in itertools.product(range(TURNS), best.items()):
        taken, answers[name] = programs[name][label]()
        seconds[name].append(taken)
    return best, seconds, answers


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Returns the quartiles of our speed over theirs, turn by turn."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}


def peer_ways(settings: Mapping[str, Timed], method: str, beam: int) -> Ways:
    """Returns a peer's ways: each batch size in the process of each setting."""
    return {
        f"{setting}, {batch}": partial(call, method, beam=beam, batch=batch)
        for (setting, call), batch in itertools.product(settings.items(), BATCHES)
    }


def given_lengths(
    peers: Mapping[str, Mapping[str, Timed]],
    torch: Timed,
    rows: Sequence[Sequence[int]],
    vocabulary: int,
) -> dict[str, Any]:
    """Compares searches whose outputs have given lengths, also with the least time of the matmuls.

    rows: ids of the sources, sorted by length.
    """
    loop: dict[str, Any] = defaultdict(dict)
    for mode, beam in MODES.items():
        search = random_search(vocabulary, beam)
        programs: dict[str, Ways] = {
            "ours": {
                str(size): partial(timed, search, [lines_of(*each) for each in batches(rows, size)])
                for size in BATCHES
            }
        }
        programs |= {name: peer_ways(each, "loop", beam) for name, each in peers.items()}
        loop["best"][mode], seconds, _ = compare(programs)
        median = {name: statistics.median(taken) for name, taken in seconds.items()}
        loop["sentences_per_s"][mode] = {name: len(rows) / median[name] for name in median}
        for name in peers:
            loop[f"ratio_to_{name}"][mode] = ratio(seconds["ours"], seconds[name])
        size = int(loop["best"][mode]["ours"])
        floor = floors(torch, list(batches(rows, size)), vocabulary, beam)
        loop["ratio_to_floor"][mode] = sum(floor.values()) / median["ours"]
        print(f"{mode}: {loop['best'][mode]}, {loop['sentences_per_s'][mode]}", flush=True)
    return loop


def floors(
    torch: Timed,
    searched: Sequence[tuple[Sequence[Sequence[int]], int]],
    vocabulary: int,
    beam: int,
) -> dict[str, float]:
    """Returns the least seconds that each kind of matmul of the search of batches takes.

    The rate of a kind is the better one of XLA and PyTorch, at the median batch.
    """
    kinds = [matmuls(len(x), len(x[-1]), n, vocabulary, beam) for x, n in searched]
    median = kinds[len(kinds) // 2]
    shapes = [shape for shape, _ in median.values()]
    _, theirs = torch("matmuls", shapes=shapes, tries=TRIES)
    seconds = {}
    for kind, *pair in zip(median, decode_ours.matmul_seconds(shapes, TRIES), theirs, strict=True):
        rate = np.prod(median[kind][0]) / min(pair)
        seconds[kind] = sum(float(np.prod(each[kind][0])) * each[kind][1] for each in kinds) / rate
    return seconds


def matmuls(
    rows: int, width: int, length: int, vocabulary: int, beam: int
) -> dict[str, tuple[tuple[int, int, int, int], int]]:
    """Returns the shape [B, M, K] x [B, K, N] of each kind of matmul of a search, and their number.

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
        "step logits": ((1, live, d, vocabulary), length),
    }


def step_ms(torch: Timed, row: Sequence[int], vocabulary: int, beam: int) -> dict[str, float]:
    """Returns where the milliseconds of a step go, for one batch of 25 equal rows alone."""
    batch, length = next(batches([row] * 25, 25))
    shape = {"vocabulary": vocabulary, "beam": beam, "rows": len(batch), "length": length}
    whole = decode_ours.batch_seconds(**shape, width=len(row)) / length * 1e3
    parts = decode_ours.step_parts(**shape)
    floor = floors(torch, [(batch, length)], vocabulary, beam)
    least = sum(seconds for kind, seconds in floor.items() if kind.startswith("step"))
    parts["products"] = least / length * 1e3
    return {"step_ms": whole} | parts | {"rest": whole - sum(parts.values())}


def curves(vocabulary: int) -> dict[str, Any]:
    """Returns the time of one batch by beam, by length and by batch size, for `plot.lines`."""
    usual = {"beam": 5, "rows": 25, "length": 24, "width": 24, "vocabulary": vocabulary}
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for title, (name, values) in CURVES.items():
        points = [(v, decode_ours.batch_seconds(**usual | {name: v}) * 1e3) for v in values]
        panels[f"ms by {title}"] = {"": points}
    return {"panels": panels, "x": "", "xscale": "log", "yscale": "log"}


def translator_of(trained: Run | Path, beam: int, early: bool = False) -> Translator:
    """Returns the translator of a run with CTranslate2's length penalty."""
    decode = DecodeConfig(beam=beam, penalty="power", alpha=1.0, early_stopping=early)
    return Translator.load(trained, decode=decode)


def translations(
    peers: Mapping[str, Mapping[str, Timed]],
    trained: Run,
    lines: Sequence[str],
    references: Sequence[str],
) -> dict[str, Any]:
    """Compares the translation of lines with a trained model, start-up apart."""
    real: dict[str, Any] = defaultdict(dict)
    for mode, beam in MODES.items():
        programs: dict[str, Ways] = {
            stop: {"": partial(timed, translator_of(trained, beam, early), lines)}
            for stop, early in STOPPING.items()
        }
        programs |= {name: peer_ways(each, "text", beam) for name, each in peers.items()}
        real["best"][mode], seconds, outputs = compare(programs)
        real["sentences_per_s"][mode] = {
            name: len(lines) / statistics.median(taken) for name, taken in seconds.items()
        }
        real["bleu"][mode] = {name: score(x, references)["bleu"] for name, x in outputs.items()}
        real["same_text"][mode] = {
            name: statistics.fmean(map(eq, outputs["early"], outputs[name])) for name in peers
        }
        for name in peers:
            real[f"ratio_to_{name}"][mode] = {
                stop: ratio(seconds[stop], seconds[name]) for stop in STOPPING
            }
        print(f"trained model, {mode}: {real['sentences_per_s'][mode]}", flush=True)
    return real


def latency(translator: Translator, lines: Sequence[str]) -> dict[str, float]:
    """Returns percentiles in milliseconds of translating one line at a time."""
    for line in lines:
        translator(line)
    times = [timed(translator, line)[0] * 1e3 for line in lines]
    return {"p50_ms": float(np.percentile(times, 50)), "p99_ms": float(np.percentile(times, 99))}


def int8(trained: Run, lines: Sequence[str], references: Sequence[str], out: Path) -> Any:
    """Compares a model with its int8 export: bytes, BLEU and seconds."""
    command_line(["export", f"--run={trained.folder}", "--format=int8", f"--out={out}"])
    models = {"float32": translator_of(trained, 5), "int8": translator_of(out, 5)}
    _, seconds, outputs = compare({n: {"": partial(timed, t, lines)} for n, t in models.items()})
    return {
        "seconds": {name: statistics.median(taken) for name, taken in seconds.items()},
        "bleu": {name: score(outputs[name], references)["bleu"] for name in models},
        "bytes": {name: decode_ours.memory(each, 32, 24) for name, each in models.items()},
    }


def waits(trained: Run, lines: Sequence[str], folder: Path) -> dict[str, Any]:
    """Returns the seconds of the command `translate`, with empty caches and with cached programs,
    and those until its first line."""

    def seconds(beam: int, lines: Sequence[str], cache: str) -> float:
        source = folder / "input.txt"
        source.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        command = [sys.executable, "-m", "transformer_jax.cli.main", "translate"]
        command += [f"--run={trained.folder}", f"--input={source}", f"--beam={beam}"]
        environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
        environment["XDG_CACHE_HOME"] = str(folder / cache)
        run = partial(subprocess.run, env=environment, check=True, stdout=subprocess.DEVNULL)
        return timed(run, command)[0]

    waited: dict[str, Any] = {}
    for mode, beam in MODES.items():
        cold = seconds(beam, lines, mode)
        cached = statistics.median(seconds(beam, lines, mode) for _ in range(3))
        waited[mode] = {"cold": cold, "cached": cached}
    first = [seconds(5, lines[:1], "first") for _ in range(6)]
    return waited | {"first_output": statistics.median(first[1:])}


def prepare(trained: Run, lines: Sequence[str], folder: Path) -> list[list[int]]:
    """Writes what peers read, and returns the ids of the sources, sorted by length.

    CTranslate2 adds the end symbol, which does not count for the lengths that it is given.
    """
    tokenizers = trained.tokenizers
    rows = sorted((tokenizers.source.encode(line) for line in lines), key=len)
    data = {
        "ids": [[*row, EOS] for row in rows],
        "pieces": [tokenizers.source.pieces(row) for row in rows],
        "lines": lines,
        "tokenizer": str(trained.folder / "tokenizer.model"),
        "vocabulary": tokenizers.source.size,
        "model": asdict(MODEL),
    }
    (folder / "data.json").write_text(json.dumps(data), "utf-8")
    _, params = decode_ours.random_model(tokenizers.source.size)
    ctranslate2.export(MODEL, tokenizers, params, folder / "random")
    command_line(
        ["export", f"--run={trained.folder}", "--format=ctranslate2", f"--out={folder / 'trained'}"]
    )
    return data["ids"]


def beams(trained: Run, lines: Sequence[str], references: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the scores of a run by beam size."""
    translator = Translator.load(trained)
    rows = []
    for beam in BEAMS:
        search = translator.with_search(replace(trained.config.decode, beam=beam))
        scores = score(search(list(lines)), references)
        rows.append({"beam": beam} | {x: scores[x] for x in ("bleu", "chrf", "length_ratio")})
    return rows


def measure(trained: Run, data: Path, python: str, folder: Path) -> dict[str, Any]:
    """Returns all results. python: that of the peers. folder: for files that are not kept."""
    corpora = MULTI30K._replace(folder=str(data))
    lines, references = corpora.sides(corpora.test)
    sources, targets = corpora.sides(corpora.dev)
    rows, vocabulary = prepare(trained, lines, folder), trained.tokenizers.source.size
    with ExitStack() as stack:

        def start(*arguments: str) -> dict[str, Timed]:
            settings = {n: peer(python, *arguments, allocator=a) for n, a in ALLOCATORS.items()}
            return {name: stack.enter_context(each) for name, each in settings.items()}

        def ctranslate2_of(model: str) -> dict[str, dict[str, Timed]]:
            options = "ctranslate2", f"{folder}/data.json", f"model={folder / model}"
            names = {"ctranslate2": 1, "ctranslate2_workers": 2}
            return {name: start(*options, f"workers={number}") for name, number in names.items()}

        hugging_face = start("hf", f"{folder}/data.json")
        torch, row = hugging_face["default"], rows[len(rows) // 2][:24]
        peers = ctranslate2_of("random") | {"hf_generate": hugging_face}
        measured: dict[str, Any] = {"loop": given_lengths(peers, torch, rows, vocabulary)}
        versions = {name: each["default"]("version")[1] for name, each in peers.items()}
        measured["versions_of_peers"] = versions
        measured["step_ms"] = {m: step_ms(torch, row, vocabulary, b) for m, b in MODES.items()}
        measured["real"] = translations(ctranslate2_of("trained"), trained, lines, references)
    measured["real"]["seconds"] = waits(trained, lines, folder)
    measured["curves"] = curves(vocabulary)
    measured["latency"] = {
        mode: latency(translator_of(trained, beam), lines[:100]) for mode, beam in MODES.items()
    }
    measured["beams"] = beams(trained, sources, targets)
    measured["int8"] = int8(trained, sources, targets, folder / "int8")
    return measured | {"model": asdict(MODEL)}


def main() -> None:
    """Reads the options, measures, and writes the files."""
    restart_with_allocator()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/multi30k_first"))
    parser.add_argument("--data", type=Path, default=Path("../shared/data/multi30k"))
    parser.add_argument("--peers", default=".venv-peers/bin/python")
    options = parser.parse_args()
    cache_programs()
    trained = train(first_recipe(options.data), options.run)  # at once, where it has been trained
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(trained, options.data, options.peers, Path(folder))
    print(results.write("decode", "make bench-decode", measured))
    plot.save(plot.lines(**measured["curves"]), results.FOLDER / "decode.svg")


if __name__ == "__main__":
    main()
