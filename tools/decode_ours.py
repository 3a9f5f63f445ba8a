"""This project's search for `tools.bench_decode`: with given lengths, its parts, and its memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import TINY, DecodeConfig
from transformer_jax.decoding.loop import Loop
from transformer_jax.decoding.strategies import Lines, Phases, make_phases
from transformer_jax.decoding.top_k import first_argmax, top_k
from transformer_jax.decoding.trained import padded
from transformer_jax.decoding.translator import THREADS, Translator
from transformer_jax.models.make import make_model
from transformer_jax.models.transformer import Model
from transformer_jax.types import Batch, Params

MODEL = replace(TINY, dropout=0.0, max_length=512)
"""The model with random parameters."""


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Returns the seconds that a call takes, and what it returns."""
    began = time.perf_counter()
    answer = jax.block_until_ready(call(*arguments))
    return time.perf_counter() - began, answer


@cache
def random_model(vocabulary: int) -> tuple[Model, Params]:
    """Returns a model with random parameters."""
    model, ids = make_model(MODEL, vocabulary, vocabulary), jnp.ones((1, 4), jnp.int32)
    return model, jax.jit(model.init)(jax.random.key(0), Batch(ids, ids, ids))["params"]


@cache
def random_search(vocabulary: int, beam: int) -> Callable[[Sequence[Lines]], Any]:
    """Returns a search of batches whose outputs have the lengths `Lines.numbers`."""
    config = DecodeConfig(beam=beam, min_length=1, alpha=1.0, penalty="power", max_ratio=100.0)
    model, params = random_model(vocabulary)
    phases = make_phases([model], config)

    def prefill(params: Sequence[Params], lines: Lines) -> Any:
        progress = phases.prefill(params, lines._replace(numbers=None))
        lengths = jnp.asarray(lines.numbers)
        sentences = progress.sentences._replace(max_length=lengths, min_length=lengths)
        return progress._replace(sentences=sentences)

    decode = jax.jit(phases.decode, donate_argnums=1)
    compiled = Phases(jax.jit(prefill), decode, jax.jit(phases.grow))
    return lambda batches: Loop(compiled, [params], batches, threads=THREADS, merge=True).run()


def lines_of(rows: Sequence[Sequence[int]], length: int) -> Lines:
    """Returns a batch of rows sorted by length, whose outputs have `length` tokens."""
    width = -(-len(rows[-1]) // 8) * 8
    numbers = np.full(len(rows), length, np.int32)
    return Lines(padded(rows, (len(rows), width)), numbers)


def batch_seconds(vocabulary: int, beam: int, rows: int, width: int, length: int) -> float:
    """Returns the median seconds of the search of one batch alone."""
    search = random_search(vocabulary, beam)
    source = np.random.default_rng(0).integers(4, vocabulary, (rows, width), np.int32)
    lines = Lines(source, np.full(rows, length, np.int32))
    search([lines])
    return statistics.median(timed(search, [lines])[0] for _ in range(5))


def step_parts(vocabulary: int, beam: int, rows: int, length: int) -> dict[str, float]:
    """Returns the median milliseconds of parts of a step."""
    logits = jax.random.normal(jax.random.key(0), (rows, beam, vocabulary))
    head = MODEL.d_model // MODEL.heads
    new = jnp.ones((rows, MODEL.heads, head, beam))
    slots = jnp.zeros((rows, MODEL.heads, head, -(-length // 16) * 16 * beam))
    cached = [slots] * (2 * MODEL.layers)  # keys and values

    def choose(x: jax.Array) -> Any:
        if beam == 1:
            return first_argmax(x), jnp.max(x)
        return top_k(x.reshape(rows, -1), 2 * beam)

    def write(i: int, arrays: list[jax.Array]) -> list[jax.Array]:
        return [jax.lax.dynamic_update_slice(x, new, (0, 0, 0, i * beam)) for x in arrays]

    def median_ms(function: Callable[..., Any], *arguments: Any) -> float:
        compiled = jax.jit(function)
        return statistics.median(timed(compiled, *arguments)[0] for _ in range(50)) * 1e3

    return {
        "softmax": median_ms(partial(jax.nn.logsumexp, axis=-1), logits),
        "top-k": median_ms(choose, logits),
        # All positions are written in one program, which does not copy the arrays each time.
        "cache": median_ms(partial(jax.lax.fori_loop, 0, length, write), cached) / length,
    }


def matmul_seconds(shapes: Sequence[tuple[int, ...]], tries: int) -> list[float]:
    """Returns the least seconds of each product [B, M, K] x [B, K, N]."""
    matmul = jax.jit(jnp.matmul)
    arrays = [(jnp.ones((b, m, k)), jnp.ones((b, k, n))) for b, m, k, n in shapes]
    return [min(timed(matmul, *pair)[0] for _ in range(tries)) for pair in arrays]


def memory(translator: Translator, rows: int, width: int) -> dict[str, int]:
    """Returns the bytes of the parameters, and of the temporaries of a search's steps."""
    phases = make_phases(translator.models, translator.config.decode)
    params = translator.all_params
    lines = Lines(jax.ShapeDtypeStruct((rows, width), jnp.int32))
    progress = jax.eval_shape(phases.prefill, params, lines)
    decode = jax.jit(phases.decode, donate_argnums=1)
    leave_at = jax.ShapeDtypeStruct((), jnp.int32)
    analysis: Any = decode.lower(params, progress, leave_at).compile().memory_analysis()
    return {
        "parameters": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        "temporaries": analysis.temp_size_in_bytes,
    }
