"""Compares decoding with CTranslate2 and Hugging Face.

    python -m tools.decode [--data FOLDER] [--run RUN]

Writes results/decode.json. FOLDER is that of Multi30k. A model with random parameters decodes the
sources of test_2016_flickr with given lengths, and RUN translates them: a run with one tokenizer,
by default that of `make multi30k`. All take turns; peers run in processes of their own.
"""

import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from tools.common import run_command, spread
from tools.decode_peers import PEERS, batches
from tools.studies import MULTI30K
from transformer_jax import Translator
from transformer_jax.allocator import ALLOCATOR, restart_with_allocator
from transformer_jax.benchmark import results
from transformer_jax.benchmark.timing import Samples, time_in_turns
from transformer_jax.cli.main import main as command_line
from transformer_jax.config import TINY, DecodeConfig
from transformer_jax.decoding.evaluation import score
from transformer_jax.decoding.loop import Loop, run
from transformer_jax.decoding.strategies import Lines, Phases, make_phases
from transformer_jax.decoding.trained import padded
from transformer_jax.decoding.translator import THREADS
from transformer_jax.interop import ctranslate2
from transformer_jax.models.make import make_model
from transformer_jax.parallel.program_cache import cache_programs
from transformer_jax.runs import run as runs
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import EOS
from transformer_jax.types import Batch, Params

RUN = Path("runs/multi30k_en_de")
PYTHON = ".venv-peers/bin/python"
"""The interpreter of an environment with ctranslate2, sentencepiece, torch and transformers."""

MODEL = replace(TINY, dropout=0.0, max_length=512)
"""The model with random parameters."""
MODES = {"beam5": 5, "greedy": 1}
BATCHES = (25, 50, 100, 250, 1000)
ALLOCATORS = {"default": "", "tuned": ALLOCATOR}
STOPPING = {"optimal": False, "early": True}
"""Values of `decode.early_stopping`."""
TURNS = 5

Timed = Callable[..., tuple[float, Any]]
"""Returns the seconds that a call takes, and what it returns."""
Ways = Mapping[str, Timed]
"""Batch sizes and settings of a program, of which the fastest counts."""
Peers = Mapping[str, Mapping[str, Timed]]
"""The processes of each peer, by the setting of the allocator."""


@contextmanager
def peer(python: str, name: str, data: Path, allocator: str) -> Iterator[Timed]:
    """Starts a process of tools/decode_peers.py that ends with the context. Yields a function that
    calls a method there: (name, **arguments)."""
    with subprocess.Popen(
        [python, "tools/decode_peers.py", name, data],
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


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Returns the seconds that a call takes, and what it returns."""
    began = time.perf_counter()
    answer = jax.block_until_ready(call(*arguments))
    return time.perf_counter() - began, answer


def compare(
    programs: Mapping[str, Ways],
) -> tuple[dict[str, str], dict[str, Samples], dict[str, Any]]:
    """Returns the fastest way of each program, its seconds in turns, and what it returns.

    Each way is called twice to choose among them, since the first call may compile.
    """
    best, answers = {}, {}
    for name, ways in programs.items():
        for way in ways.values():
            way()
        best[name] = min(ways, key=lambda label: ways[label]()[0])

    def seconds(name: str, _: int) -> float:
        taken, answers[name] = programs[name][best[name]]()
        return taken

    return best, time_in_turns({name: partial(seconds, name) for name in best}, TURNS), answers


def peer_ways(peers: Peers, method: str, beam: int) -> dict[str, Ways]:
    """Returns the ways of each peer: each batch size in the process of each setting."""
    return {
        name: {
            f"{setting}, {batch}": partial(call, method, beam=beam, batch=batch)
            for (setting, call), batch in itertools.product(settings.items(), BATCHES)
        }
        for name, settings in peers.items()
    }


def random_params(vocabulary: int) -> Params:
    """Returns random parameters of `MODEL`."""
    model, ids = make_model(MODEL, vocabulary, vocabulary), jnp.ones((1, 4), jnp.int32)
    return jax.jit(model.init)(jax.random.key(0), Batch(ids, ids, ids))["params"]


def random_search(vocabulary: int, beam: int) -> Callable[[Sequence[Lines]], Any]:
    """Returns a search of batches whose outputs have the lengths `Lines.numbers`."""
    config = DecodeConfig(beam=beam, min_length=1, alpha=1.0, penalty="power", max_ratio=100.0)
    params = random_params(vocabulary)
    phases = make_phases([make_model(MODEL, vocabulary, vocabulary)], config)

    def prefill(params: Sequence[Params], lines: Lines) -> Any:
        progress = phases.prefill(params, lines._replace(numbers=None))
        lengths = jnp.asarray(lines.numbers)
        sentences = progress.sentences._replace(max_length=lengths, min_length=lengths)
        return progress._replace(sentences=sentences)

    decode = jax.jit(phases.decode, donate_argnums=1)
    compiled = Phases(jax.jit(prefill), decode, jax.jit(phases.grow))
    loop = partial(Loop, compiled, [params], threads=THREADS, merge=True)
    return lambda batches: run([loop(batches=batches)])


def lines_of(rows: Sequence[Sequence[int]], length: int) -> Lines:
    """Returns a batch of rows sorted by length, whose outputs have `length` tokens."""
    width = -(-len(rows[-1]) // 8) * 8
    numbers = np.full(len(rows), length, np.int32)
    return Lines(padded(rows, (len(rows), width)), numbers)


def given_lengths(
    peers: Peers, rows: Sequence[Sequence[int]], vocabulary: int
) -> dict[str, dict[str, Any]]:
    """Compares searches whose outputs have given lengths.

    rows: ids of the sources, sorted by length.
    """
    loop: dict[str, dict[str, Any]] = defaultdict(dict)
    for mode, beam in MODES.items():
        search = random_search(vocabulary, beam)
        inputs = {f"{n}": [lines_of(*each) for each in batches(rows, n)] for n in BATCHES}
        ours = {size: partial(timed, search, each) for size, each in inputs.items()}
        best, seconds, _ = compare({"ours": ours} | peer_ways(peers, "loop", beam))
        loop["best"][mode] = best
        loop["sentences_per_s"][mode] = {n: len(rows) / x.median for n, x in seconds.items()}
        for name in peers:
            loop[f"ratio_to_{name}"][mode] = spread(seconds[name].over(seconds["ours"]))
        print(f"{mode}: {best}, {loop['sentences_per_s'][mode]}", flush=True)
    return loop


def translator_of(trained: Run | Path, beam: int, early: bool = False) -> Translator:
    """Returns the translator of a run with CTranslate2's length penalty."""
    decode = DecodeConfig(beam=beam, penalty="power", alpha=1.0, early_stopping=early)
    return Translator.load(trained, decode=decode)


def translations(
    peers: Peers, trained: Run, lines: Sequence[str], references: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Compares the translation of lines with a trained model, start-up apart."""
    real: dict[str, dict[str, Any]] = defaultdict(dict)
    for mode, beam in MODES.items():
        ours: dict[str, Ways] = {
            stop: {"": partial(timed, translator_of(trained, beam, early), lines)}
            for stop, early in STOPPING.items()
        }
        real["best"][mode], seconds, outputs = compare(ours | peer_ways(peers, "text", beam))
        real["sentences_per_s"][mode] = {n: len(lines) / x.median for n, x in seconds.items()}
        real["bleu"][mode] = {name: score(x, references)["bleu"] for name, x in outputs.items()}
        same = {n: statistics.fmean(map(eq, outputs["early"], outputs[n])) for n in peers}
        real["same_text"][mode] = same
        for name in peers:
            ratios = {stop: spread(seconds[name].over(seconds[stop])) for stop in STOPPING}
            real[f"ratio_to_{name}"][mode] = ratios
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
        "seconds": {name: taken.median for name, taken in seconds.items()},
        "bleu": {name: score(outputs[name], references)["bleu"] for name in models},
        "bytes": {name: memory(each, 32, 24) for name, each in models.items()},
    }


def memory(translator: Translator, rows: int, width: int) -> dict[str, int]:
    """Returns the bytes of the parameters, and of the temporaries of a search's steps."""
    phases = make_phases(translator.models, translator.config.decode)
    params = translator.all_params
    lines = Lines(jax.ShapeDtypeStruct((rows, width), jnp.int32))
    progress = jax.eval_shape(phases.prefill, params, lines)
    decode = jax.jit(phases.decode, donate_argnums=1)
    leave_at = jax.ShapeDtypeStruct((), jnp.int32)
    analysis: Any = decode.lower(params, progress, leave_at).compile().memory_analysis()
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return {"parameters": parameters, "temporaries": analysis.temp_size_in_bytes}


def waits(trained: Run, lines: Sequence[str], folder: Path) -> dict[str, Any]:
    """Returns the seconds of the command `translate`, with empty caches and with cached programs,
    and those until its first line."""

    def seconds(beam: int, lines: Sequence[str], cache: str) -> float:
        source = folder / "input.txt"
        source.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        options = f"--run={trained.folder}", f"--input={source}", f"--beam={beam}"
        return run_command("translate", *options, XDG_CACHE_HOME=str(folder / cache))[1]

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
    tokenizers, size = trained.tokenizers, trained.tokenizers.source.size
    rows = sorted((tokenizers.source.encode(line) for line in lines), key=len)
    data = {
        "ids": [[*row, EOS] for row in rows],
        "pieces": [tokenizers.source.pieces(row) for row in rows],
        "lines": lines,
        "tokenizer": str(trained.folder / "tokenizer.model"),
        "vocabulary": size,
        "model": asdict(MODEL),
        "random": str(folder / "random"),
        "trained": str(folder / "trained"),
    }
    (folder / "data.json").write_text(json.dumps(data), "utf-8")
    random = replace(trained, config=replace(trained.config, model=MODEL))
    ctranslate2.export(random, 0, random_params(size), folder / "random")
    ctranslate2.export(trained, trained.best_step(), trained.params(), folder / "trained")
    return data["ids"]


def measure(trained: Run, data: str, python: str, folder: Path) -> dict[str, Any]:
    """Returns all results. python: that of the peers. folder: for files that are not kept."""
    corpora = MULTI30K._replace(folder=data)
    lines, references = corpora.sides(corpora.test)
    rows, vocabulary = prepare(trained, lines, folder), trained.tokenizers.source.size
    with ExitStack() as stack:
        peers = {
            name: {
                setting: stack.enter_context(peer(python, name, folder / "data.json", allocator))
                for setting, allocator in ALLOCATORS.items()
            }
            for name in PEERS
        }
        measured: dict[str, Any] = {"loop": given_lengths(peers, rows, vocabulary)}
        versions = {name: each["default"]("version")[1] for name, each in peers.items()}
        measured["versions_of_peers"] = versions
        del peers["hf_generate"]  # whose parameters are random
        measured["real"] = translations(peers, trained, lines, references)
    measured["real"]["seconds"] = waits(trained, lines, folder)
    measured["latency"] = {
        mode: latency(translator_of(trained, beam), lines[:100]) for mode, beam in MODES.items()
    }
    measured["int8"] = int8(trained, *corpora.sides(corpora.dev), folder / "int8")
    return measured | {"model": asdict(MODEL), "trained": asdict(trained.config.model)}


def main(data: str = MULTI30K.folder, run: Path = RUN) -> None:
    """Measures, and writes the file."""
    restart_with_allocator()
    cache_programs()
    trained = runs.load(run)
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(trained, data, PYTHON, Path(folder))
    print(results.write("decode", "make measure NAME=decode", measured))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
