"""Decodes with this project for `tools.bench_decode`.

    python -m tools.decode_child

Reads tasks as lines of JSON and prints their results.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tools.decode_peers import batches, serve
from transformer_jax.config import TINY, DecodeConfig, ModelConfig
from transformer_jax.decoding.loop import Loop
from transformer_jax.decoding.strategies import Lines, Phases, make_phases
from transformer_jax.decoding.top_k import first_argmax, top_k
from transformer_jax.decoding.trained import padded
from transformer_jax.decoding.translator import THREADS, Translator
from transformer_jax.models.make import make_model
from transformer_jax.models.transformer import Model
from transformer_jax.parallel.program_cache import cache_programs
from transformer_jax.types import Batch, Params

MODEL: ModelConfig = dataclasses.replace(TINY, dropout=0.0, max_length=512)
"""The model of the loop: the size of the peers' models in ../shared/peers."""


@cache
def random_model(vocabulary: int) -> tuple[Model, Params]:
    """Returns a model with random parameters."""
    model, ids = make_model(MODEL, vocabulary, vocabulary), jnp.ones((1, 4), jnp.int32)
    return model, jax.jit(model.init)(jax.random.key(0), Batch(ids, ids, ids))["params"]


@cache
def _search(
    vocabulary: int, beam: int
) -> Callable[[Sequence[Lines]], list[list[list[np.ndarray]]]]:
    """Returns a search of batches whose outputs have the lengths `Lines.numbers`."""
    config = DecodeConfig(beam=beam, min_length=1, alpha=1.0, penalty="power", max_ratio=100.0)
    phases = make_phases([random_model(vocabulary)[0]], config)

    def prefill(params: Sequence[Params], lines: Lines) -> Any:
        progress = phases.prefill(params, lines._replace(numbers=None))
        lengths = jnp.asarray(lines.numbers)
        sentences = progress.sentences._replace(max_length=lengths, min_length=lengths)
        return progress._replace(sentences=sentences)

    compiled = Phases(
        jax.jit(prefill),
        jax.jit(phases.decode, donate_argnums=1),
        jax.jit(phases.grow),
    )
    params = [random_model(vocabulary)[1]]
    return lambda batches: Loop(compiled, params, batches, threads=THREADS, merge=True).run()


def loop(data: str, beam: int, batch: int, warm: bool = False) -> dict[str, Any]:
    """Returns the time of a search in which all lengths are given. warm: after another."""
    given = json.loads(Path(data).read_text())
    rows = list(batches(given["ids"], batch))
    if warm:
        _decode(rows, given["vocabulary"], beam)
    began = time.perf_counter()
    tokens = _decode(rows, given["vocabulary"], beam)
    return {"seconds": time.perf_counter() - began, "tokens": tokens}


def _decode(rows: Sequence[tuple[Any, int]], vocabulary: int, beam: int) -> int:
    """Returns the number of tokens of the best outputs."""
    batches = []
    for members, length in rows:
        width = -(-len(members[-1]) // 8) * 8
        numbers = np.full(len(members), length, np.int32)
        batches.append(Lines(padded(members, (len(members), width)), numbers))
    found = _search(vocabulary, beam)(batches)
    return sum(int(np.sum(ids[0] != 0)) for batch in found for ids, *_ in batch)


def one_batch(vocabulary: int, beam: int, rows: int, width: int, length: int) -> float:
    """Returns the time of the search of one batch alone in seconds, the median of 5."""
    search = _search(vocabulary, beam)
    source = np.random.default_rng(0).integers(4, vocabulary, (rows, width), np.int32)
    lines = Lines(source, np.full(rows, length, np.int32))
    search([lines])
    return _seconds(lambda: search([lines]), 5)[0]


def parts(vocabulary: int, beam: int, rows: int, length: int) -> dict[str, float]:
    """Returns the time of parts of a step at half its length in milliseconds."""
    config, slots = MODEL, -(-length // 16) * 16 * beam
    logits = jax.random.normal(jax.random.key(0), (rows, beam, vocabulary))
    head = config.d_model // config.heads
    shape = (2 * config.layers, rows, config.heads, head, slots)
    new = jnp.ones((*shape[:-1], beam))

    def choose(x: Any) -> Any:
        if beam == 1:
            return first_argmax(x), jnp.max(x)
        return top_k(x.reshape(rows, -1), 2 * beam)

    def write(arrays: Any) -> Any:
        return [jax.lax.dynamic_update_slice(x, new[0], (0, 0, 0, 3)) for x in arrays]

    writes = jax.jit(write, donate_argnums=0)
    state = writes([jnp.zeros(shape[1:]) for _ in range(shape[0])])

    def written() -> None:
        nonlocal state
        state = jax.block_until_ready(writes(state))

    normalize = jax.jit(partial(jax.nn.logsumexp, axis=-1))
    chosen = jax.jit(choose)
    tasks: dict[str, Callable[[], Any]] = {
        "softmax": lambda: normalize(logits),
        "top-k": lambda: chosen(logits),
        "cache": written,
    }
    return {name: _seconds(task, 50)[0] * 1e3 for name, task in tasks.items()}


def products(shapes: Sequence[Sequence[int]], tries: int) -> list[float]:
    """Returns the least time in seconds of products [B, M, K] x [B, K, N] with XLA."""
    found = []
    for b, m, k, n in shapes:
        left, right = jnp.ones((b, m, k)), jnp.ones((b, k, n))
        product = jax.jit(jnp.matmul)
        product(left, right).block_until_ready()
        found.append(_seconds(lambda: product(left, right), tries)[1])  # noqa: B023
    return found


@cache
def _translator(folder: str, beam: int, early: bool = False) -> Translator:
    decode = DecodeConfig(beam=beam, penalty="power", alpha=1.0, early_stopping=early)
    return Translator.load(folder, decode=decode)


def text(folder: str, source: str, beam: int, early: bool) -> dict[str, Any]:
    """Returns the time from lines of text to their translations, and these."""
    translator = _translator(folder, beam, early)
    lines = Path(source).read_text("utf-8").splitlines()
    began = time.perf_counter()
    outputs = translator(lines)
    return {"seconds": time.perf_counter() - began, "outputs": [str(line) for line in outputs]}


def latency(folder: str, source: str, beam: int, count: int) -> dict[str, float]:
    """Returns percentiles in milliseconds of translating one line at a time."""
    translator = _translator(folder, beam)
    lines = Path(source).read_text("utf-8").splitlines()[:count]
    for line in lines:
        translator(line)
    times = [_seconds(lambda: translator(line), 1)[0] * 1e3 for line in lines]  # noqa: B023
    return {"p50_ms": float(np.percentile(times, 50)), "p99_ms": float(np.percentile(times, 99))}


def differing(folder: str, source: str, beam: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Returns how many lines have another text, and the largest difference of the scores of those
    with the same text, in batches of other sizes than those of the first size."""
    lines = Path(source).read_text("utf-8").splitlines()
    base = _translator(folder, beam)
    first, *others = (
        base.with_search(dataclasses.replace(base.config.decode, batch_tokens=size))(lines)
        for size in sizes
    )
    pairs = [pair for other in others for pair in zip(first, other, strict=True)]
    errors = [abs(a.score - b.score) for a, b in pairs if a == b]
    return {"texts": sum(a != b for a, b in pairs), "of": len(pairs), "score_error": max(errors)}


def memory(folder: str, beam: int, rows: int, width: int) -> dict[str, int]:
    """Returns the bytes of the parameters and of the temporaries of a search's steps."""
    translator = _translator(folder, beam)
    phases = make_phases(translator.models, translator.config.decode)
    params = translator.all_params
    lines = Lines(jax.ShapeDtypeStruct((rows, width), jnp.int32))
    progress = jax.eval_shape(phases.prefill, params, lines)
    leave_at = jax.ShapeDtypeStruct((), jnp.int32)
    decode = jax.jit(phases.decode, donate_argnums=1)
    compiled = decode.lower(params, progress, leave_at).compile()
    found: Any = compiled.memory_analysis()
    return {
        "parameters": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        "temporaries": found.temp_size_in_bytes,
    }


def _seconds(task: Callable[[], Any], tries: int) -> tuple[float, float]:
    """Returns the median and the least time of a task."""
    times = []
    for _ in range(tries):
        began = time.perf_counter()
        jax.block_until_ready(task())
        times.append(time.perf_counter() - began)
    return statistics.median(times), min(times)


def start() -> str:
    """Returns the version of JAX, once programs are cached."""
    cache_programs()
    return jax.__version__


def main() -> None:
    """Serves the tasks."""
    tasks = (start, loop, one_batch, parts, products, text, latency, differing, memory)
    serve({task.__name__: task for task in tasks})


if __name__ == "__main__":
    main()
