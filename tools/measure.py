"""Measures what the documents show and no other command measures.

    python -m tools.measure NAME

NAME is one of `CASES`, functions whose results are written to results/NAME.json.
"""

import argparse
import itertools
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from tools.common import CLI, memory_mib
from tools.parts import parts, wait_for
from tools.scaling import CHIP
from transformer_jax import load_config_file, train
from transformer_jax.allocator import restart_with_allocator
from transformer_jax.attention import Mask, attend, scores
from transformer_jax.attention.gathered import local_p_gathered
from transformer_jax.benchmark import results
from transformer_jax.benchmark.timing import time_in_turns, timer
from transformer_jax.config import SMALL, Config, ExecutionConfig
from transformer_jax.data.buckets import Shape
from transformer_jax.files import AnyPath
from transformer_jax.flops import count_flops
from transformer_jax.models.make import count_parameters
from transformer_jax.parallel.devices import ACCELERATORS
from transformer_jax.special_ids import EOS
from transformer_jax.text.corpus import Corpus
from transformer_jax.training.planning import Planner, temporary_bytes
from transformer_jax.types import Batch

MIB = 2**20


def random_batch(shape: Shape, vocabulary: int) -> Batch:
    """Returns a batch of random ids, without padding; both sides have the length of the source."""
    draw = np.random.default_rng(0)
    return Batch(*draw.integers(EOS + 1, vocabulary, (3, shape.rows, shape.source), np.int32))


def remat() -> dict[str, Any]:
    """Compares the policies of rematerialization by operations, memory and time of a gradient."""
    shape, vocabulary, samples = Shape(16, 128, 128), 8000, 5
    batch, key = random_batch(shape, vocabulary), jax.random.key(0)
    rows: dict[str, dict[str, Any]] = {}
    calls = {}
    for policy in ("none", "matmuls", "layers"):
        config = Config(model=SMALL, execution=ExecutionConfig(remat=policy))
        planner = Planner(config, (vocabulary, vocabulary), jax.devices()[:1])
        state = jax.jit(planner.setup.init)(key)
        program = planner.setup.compile_gradients().lower(state, batch, key).compile()
        rows[policy] = {"remat": policy, "gflop": planner.flops(shape) / 1e9}
        rows[policy]["temporaries_mib"] = temporary_bytes(program) / MIB
        calls[policy] = timer(partial(wait_for, program, state, batch, key))
    for policy, seconds in time_in_turns(calls, samples).items():
        rows[policy]["gradient_ms"] = seconds.median * 1e3
    return {"shape": shape._asdict(), "devices": 1, "samples": samples, "rows": [*rows.values()]}


HEADS, WIDTH = 8, 64

Arrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Query, keys, values [1, N, S, H], and each query's center [1, N, S] as a share of the length."""


def local_p(arrays: Arrays, window: int) -> jax.Array:
    """Attends to windows around the centers."""
    query, keys, values, share = arrays
    length = jnp.full((1, query.shape[2]), keys.shape[2])
    near = {"center": share * keys.shape[2], "window": window, "score": Partial(scores.scaled_dot)}
    return local_p_gathered(query, keys, values, 0 * length, length, **near)


def both(kind: Callable[..., Any], arrays: Arrays, window: int) -> Any:
    """Returns the context and the gradients of all arrays; the query serves as its gradient."""
    context, back = jax.vjp(partial(kind, window=window), arrays)
    return context, back(arrays[0])


KINDS: dict[str, Callable[..., Any]] = {
    "soft": lambda x, window: attend(*x[:3], kernel="blockwise")[0],
    "local-m": lambda x, window: attend(*x[:3], mask=Mask(window=window), kernel="blockwise")[0],
    "local-p": local_p,
}
"""Attention to all keys, to a sliding window, and to windows around the centers."""
MODES: dict[str, Callable[..., Any]] = {
    "forward": lambda kind, arrays, window: kind(arrays, window),
    "both": both,
}


def flops_per_query(kind: str, mode: str, length: int, window: int) -> float:
    """Returns the operations of matmuls for a query of one head."""
    array = jax.ShapeDtypeStruct((1, HEADS, length, WIDTH), jnp.float32)
    share = jax.ShapeDtypeStruct(array.shape[:3], jnp.float32)
    run = partial(MODES[mode], KINDS[kind], window=window)
    return count_flops(run, (array, array, array, share)) / (HEADS * length)


def windows() -> dict[str, Any]:
    """Measures whether the cost of local attention follows from the window, not from the length."""
    rows, samples = [], 3
    widths = (16, 64, 256)  # positions on each side of a window
    for length, window in itertools.product((512, 1024, 2048, 4096), widths):
        *keys, key = jax.random.split(jax.random.key(0), 4)
        arrays = [jax.random.normal(each, (1, HEADS, length, WIDTH)) for each in keys]
        arrays.append(jax.random.uniform(key, (1, HEADS, length)))
        calls = {}
        for kind, mode in itertools.product(KINDS, MODES):
            if kind != "soft" or window == widths[0]:  # soft has no window: measured once
                run = jax.jit(partial(MODES[mode], KINDS[kind], window=window))
                run = partial(run, tuple(arrays))
                calls[kind, mode] = timer(lambda run=run: jax.block_until_ready(run()))
        for (kind, mode), seconds in time_in_turns(calls, samples).items():
            row = {"kind": kind, "mode": mode, "length": length}
            row["window"] = None if kind == "soft" else window
            row["flops_per_query"] = flops_per_query(kind, mode, length, window)
            row["us_per_query"] = seconds.median / (HEADS * length) * 1e6
            rows.append(row)
    return {"heads": HEADS, "head_size": WIDTH, "batch": 1, "samples": samples, "rows": rows}


def million_lines(
    run: AnyPath = Path("runs/quickstart"),
    lines: int = 1_000_000,
    looks: Sequence[int] = (10_000, 100_000, 1_000_000),
) -> dict[str, Any]:
    """Measures the memory of `translate` on the lines of the built-in corpus, again and again.

    run: the quickstart's, which is trained if it is not there. looks: numbers of translated lines
    after which the peak memory is read, from /proc.
    """
    if not (run / "config.json").exists():
        train(load_config_file("configs/quickstart.py"), run)
    command = (*CLI, "translate", f"--run={run}", "--beam=1")
    peaks: dict[str, float] = {}
    count = 0
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        sources = itertools.cycle(source for source, _ in Corpus("grammar:test").pairs())
        file.writelines(f"{line}\n" for line in itertools.islice(sources, lines))
        file.seek(0)
        began = time.monotonic()
        with subprocess.Popen(command, stdin=file, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for count, _ in enumerate(process.stdout, start=1):
                if count in looks:
                    peaks[str(count)] = memory_mib("VmHWM", process.pid)
    if process.returncode:
        raise RuntimeError(f"translate ended with status {process.returncode}")
    seconds = time.monotonic() - began
    return {"lines": lines, "translated": count, "seconds": seconds, "peak_mib": peaks}


def real_sizes(chips: int = 8, length: int = 64) -> dict[str, Any]:
    """Plans the recipes of IWSLT14 and WMT14 with sentences of `length` tokens; trains nothing.

    Operations are counted from the traced step, memory is estimated, and the hours are the
    operations over the peak of the chips.
    """
    recipes = {}
    for path in sorted(Path("configs").glob("*14_*.py")):
        config = load_config_file(str(path))
        vocabularies = config.tokenizer.vocabulary, config.tokenizer.vocabulary
        planner = Planner(config, vocabularies, chips)
        batch = Shape(config.data.batch_tokens // length, length, length)
        flops, steps = planner.flops(batch), config.train.steps
        assert steps is not None
        recipes[path.stem] = {
            "parameters": count_parameters(config.model, *vocabularies),
            "batch_tokens": config.data.batch_tokens,
            "steps": steps,
            "microbatches": planner.setup.microbatches,
            "memory_mib": sum(planner.memory(batch)) / MIB,
            "tflop_per_step": flops / 1e12,
            "eflop": flops * steps / 1e18,
            "hours_at_peak": flops * steps / (chips * ACCELERATORS[CHIP].tflops * 1e12) / 3600,
        }
    return {"chips": chips, "chip": CHIP, "length": length, "recipes": recipes}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    case.__name__: case for case in (remat, parts, windows, million_lines, real_sizes)
}


def main() -> None:
    """Runs the case that is named and writes its result file."""
    restart_with_allocator()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CASES)
    name = parser.parse_args().name
    print(results.write(name, f"make measure NAME={name}", CASES[name]()))


if __name__ == "__main__":
    main()
