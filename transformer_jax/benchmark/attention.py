"""Compares kernels of attention by time, memory and error (`transformer-jax bench attention`).

Arrays are [B, N, T, H], as `attend` receives them in the model.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from transformer_jax.attention import Mask, attend
from transformer_jax.attention.kernels import KERNELS, choose
from transformer_jax.benchmark import pytorch
from transformer_jax.benchmark.exact import exact
from transformer_jax.benchmark.settings import AttentionBenchmark
from transformer_jax.benchmark.timing import Samples, Timer, time_in_turns, timer
from transformer_jax.errors import UserError
from transformer_jax.flops import largest_matmul
from transformer_jax.parallel.compile import compile_step
from transformer_jax.parallel.devices import shortage
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.types import Heads, KVHeads

MAX_SAMPLES = 15
"""Samples of each implementation at most."""
MAX_SECONDS = 3.0
"""Seconds of them, unless the fewest samples take longer."""
MAX_LENGTH_ALL_HEADS = 1024
"""The length up to which all heads are compared with float64; beyond it, the first and the last."""
SCORES_PER_STEP = 2**20
STEPS = 16
"""Steps in a call of `matmuls`, so that the cost of the call itself is negligible, and the scores
that each computes, so that long sequences need little memory."""

Record = dict[str, Any]
Arrays = list[jax.Array]


class Case(NamedTuple):
    """One combination of sizes, mask and type, in which all kernels are compared."""

    dtype: str
    batch: int
    mask: str
    length: int
    direction: str
    """forward, or both: forward and backward."""
    heads: int
    kv_heads: int
    head_size: int

    def labels(self) -> Record:
        """Returns what tells the cases of one benchmark apart, as its records name it."""
        names = ("dtype", "batch", "mask", "length", "direction")
        return {name: getattr(self, name) for name in names}

    @property
    def attention_mask(self) -> Mask | None:
        """Returns the mask as `attend` takes it."""
        return Mask(causal=True) if self.mask == "causal" else None

    @property
    def inputs(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes and types of query, key, value and the output's gradient."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = ((self.batch, n, self.length, self.head_size) for n in heads)
        return [jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)) for shape in shapes]

    @property
    def flops(self) -> int:
        """Returns the operations of all matmuls: 2 forward and 4 backward, for each head 2 H for
        each score that the mask leaves."""
        length = self.length
        scores = length * (length + 1) // 2 if self.mask == "causal" else length**2
        matmuls = 6 if self.direction == "both" else 2
        return matmuls * 2 * scores * self.head_size * self.batch * self.heads


class Program(NamedTuple):
    """A compiled function of arrays."""

    compiled: Any
    facts: Record
    """Seconds of compilation and bytes of memory."""
    needed_bytes: int
    """The least memory that a call allocates."""


class Implementation(NamedTuple):
    """A way to compute attention that is timed."""

    time: Timer
    run: Callable[[], list[Any]]
    """Returns the output and, where the case has them, the gradients of query, key and value."""
    record: Record
    """What is reported of it besides its times and its error."""


def cases(settings: AttentionBenchmark) -> Iterator[Case]:
    """Yields every case, in the order of its labels, short lengths before long ones as listed."""
    lists = (settings.dtypes, settings.batches, settings.masks, settings.lengths)
    heads = (settings.heads, settings.kv_heads or settings.heads, settings.head_size)
    for labels in itertools.product(*lists, ("forward", "both")):
        yield Case(*labels, *heads)


def measure(settings: AttentionBenchmark, dump: Path | None = None) -> Iterator[list[Record]]:
    """Checks the kernels and returns an iterator that measures case by case.

    It yields the records of a case, one for each kernel and one for PyTorch. `dump` is a folder
    for the optimized HLO of every program.
    """
    kernels = settings.kernels or supported_kernels(settings)
    check_kernels(settings, kernels)
    return _measure_cases(settings, kernels, dump)


def supported_kernels(settings: AttentionBenchmark) -> tuple[str, ...]:
    """Returns "auto" and the kernels that support every case on this platform."""
    supported = ["auto"]
    for kernel in KERNELS:
        with contextlib.suppress(UserError):
            check_kernels(settings, (kernel,))
            supported.append(kernel)
    return tuple(supported)


def check_kernels(settings: AttentionBenchmark, kernels: tuple[str, ...]) -> None:
    """Raises UserError if a kernel does not support some case. Computes nothing."""
    for case, kernel in itertools.product(cases(settings), kernels):
        jax.eval_shape(attention_function(case, kernel), *case.inputs)


def _measure_cases(
    settings: AttentionBenchmark, kernels: tuple[str, ...], dump: Path | None
) -> Iterator[list[Record]]:
    with pytorch.workers(jax.default_backend(), pytorch.Attention) as workers:
        # The first measurement is slow while threads start: the shortest case is measured before.
        shortest = min(cases(settings), key=lambda case: case.length)
        measure_case(shortest._replace(direction="both"), kernels, workers)
        for case in cases(settings):
            yield [case.labels() | r for r in measure_case(case, kernels, workers, dump)]


def measure_case(
    case: Case,
    kernels: tuple[str, ...],
    workers: Mapping[str, pytorch.Worker],
    dump: Path | None = None,
) -> list[Record]:
    """Returns the records of what cannot be measured, then of the kernels and of PyTorch."""
    query, key, *_ = case.inputs
    selected = choose(query, key, case.attention_mask)
    names = dict.fromkeys(selected if name == "auto" else name for name in kernels)
    records: list[Record] = [
        {"kernel": name, "auto": name == selected and "auto" in kernels} for name in names
    ]
    # Inputs, their float32 copies and the results here; inputs and results in each worker.
    input_bytes = sum(x.size * x.dtype.itemsize for x in case.inputs)
    if message := shortage((3 + 2 * len(workers)) * input_bytes):
        return [record | {"does_not_fit": message} for record in records]
    inputs = draw_inputs(case)
    ours: list[Implementation] = []
    for record in records:
        with pytorch.failure_in(record):
            program = compile_kernel(case, record["kernel"], inputs, dump)
            record |= program.facts
            if message := shortage(program.needed_bytes):
                record["does_not_fit"] = message
                continue
            run = partial(_run, program.compiled, inputs)
            run()
            ours.append(Implementation(timer(run), run, record))
    if not ours:
        return records
    peers: list[Implementation] = []
    for allocator, ask in workers.items():
        records.append(record := {"kernel": "torch", "allocator": allocator})
        with pytorch.failure_in(record):
            arrays = [np.asarray(x.astype(np.float32)) for x in inputs]
            task = (jax.default_backend(), case.dtype, case.mask, case.direction)
            record |= ask("load", arrays, *task)
            ask("run")
            peers.append(Implementation(partial(ask, "time"), partial(ask, "run"), record))
    measured = _time(case, ours, peers, inputs)
    for ask in workers.values():
        with contextlib.suppress(RuntimeError):  # the process has ended, as its record says
            ask("unload")
    return [r for r in records if "failed" in r or "does_not_fit" in r] + measured


def _run(compiled: Any, inputs: Arrays) -> Arrays:
    return jax.block_until_ready(compiled(*inputs))


def _time(
    case: Case, ours: list[Implementation], peers: list[Implementation], inputs: Arrays
) -> list[Record]:
    """Times kernels, PyTorch and the matmuls in turns. Returns the records of the kernels and of
    PyTorch with its faster allocator."""
    call, flops = matmuls(case)
    timers = [*(each.time for each in (*ours, *peers)), timer(call)]
    *samples, alone = time_in_turns(dict(enumerate(timers)), MAX_SAMPLES, MAX_SECONDS).values()
    peak = flops / min(alone.values)
    reported, torch = list(zip([*ours, *peers], samples, strict=True)), None
    if peers:
        of_peers = reported[len(ours) :]
        fastest, torch = min(of_peers, key=lambda each: each[1].median)
        medians = {each.record["allocator"]: times.median for each, times in of_peers}
        fastest.record["median_s_by_allocator"] = medians
        reported[len(ours) :] = [(fastest, torch)]
    mask = np.tri(case.length, dtype=bool)[None] if case.mask == "causal" else None
    true = exact(inputs, mask, all_heads=case.length <= MAX_LENGTH_ALL_HEADS)
    return [
        each.record | summarize(case, times, peak, torch) | {"error": true.error(each.run())}
        for each, times in reported
    ]


def summarize(case: Case, times: Samples, peak: float, torch: Samples | None) -> Record:
    """Returns what follows from the times of an implementation.

    share_of_matmuls: of `peak`, the operations a second of the matmuls alone. ratio_to_torch: the
    median, over the turns, of PyTorch's time over this one's.
    """
    ratio = None if torch is None else torch.over(times)
    return {
        "median_s": times.median,
        "spread_s": times.quartiles,
        "samples": len(times.values),
        "gflops": case.flops / times.median / 1e9,
        "share_of_matmuls": case.flops / times.median / peak,
        "ratio_to_torch": ratio and ratio.median,
        "ratio_to_torch_spread": ratio and ratio.quartiles,
    }


def draw_inputs(case: Case) -> Arrays:
    """Returns query, key, value and the output's gradient, normally distributed."""
    keys = jax.random.split(jax.random.key(0), len(case.inputs))
    inputs = zip(keys, case.inputs, strict=True)
    return [jax.random.normal(key, x.shape, x.dtype) for key, x in inputs]


def attention_function(case: Case, kernel: str) -> Callable[..., Arrays]:
    """Returns the function to time: attention by a kernel, of query, key, value and gradient.

    It returns the output and, in the direction "both", the gradients of query, key and value.
    """

    def output_of(query: Heads, key: KVHeads, value: KVHeads) -> Heads:
        return attend(query, key, value, case.attention_mask, kernel=kernel)[0]

    def function(query: Heads, key: KVHeads, value: KVHeads, gradient: Heads) -> Arrays:
        if case.direction == "forward":
            return [output_of(query, key, value)]
        output, backward = jax.vjp(output_of, query, key, value)
        return [output, *backward(gradient)]

    return function


def compile_kernel(case: Case, kernel: str, inputs: Arrays, dump: Path | None = None) -> Program:
    """Compiles attention by a kernel, and writes its optimized HLO into the folder `dump`.

    XLA hands some matmuls, with the operations that follow them, to libraries whose memory it does
    not report. If its temporaries are smaller than the largest result of a matmul, that has
    happened: temporaries_bytes is None.
    """
    function = attention_function(case, kernel)
    lowered = _lower(case, function, inputs)
    start = time.perf_counter()
    compiled = lowered.compile()
    compile_s = time.perf_counter() - start
    if dump is not None:
        name = "-".join(map(str, (kernel.replace(":", "."), *case.labels().values())))
        (dump / f"{name}.hlo.txt").write_text(compiled.as_text(), "utf-8")
    memory = compiled.memory_analysis()
    reported, largest = memory.temp_size_in_bytes, largest_matmul(function, *inputs)
    facts = {
        "compile_s": compile_s,
        "temporaries_bytes": reported if reported >= largest else None,
        "input_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
    }
    return Program(compiled, facts, max(reported, largest) + memory.output_size_in_bytes)


def matmuls(case: Case) -> tuple[Callable[[], Any], int]:
    """Returns a call of the two matmuls of attention alone, at the case's length and width, and its
    operations. No kernel that is made of matmuls exceeds their rate."""

    def function(
        query: Float[Array, "T H"], keys: Float[Array, "S H"], steps: Int[Array, " steps"]
    ) -> Arrays:
        def step(total: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
            shifted = query + index.astype(query.dtype)  # a new query, so that no step is reused
            return total + (shifted @ keys.T) @ keys, None

        return [jax.lax.scan(step, query, steps)[0]]

    queries = max(1, SCORES_PER_STEP // case.length)
    query, keys = (jnp.ones((rows, case.head_size), case.dtype) for rows in (queries, case.length))
    inputs = [query, keys, jnp.arange(STEPS)]
    flops = STEPS * 4 * queries * case.length * case.head_size
    return partial(_run, _lower(case, function, inputs).compile(), inputs), flops


def _lower(case: Case, function: Callable[..., Any], inputs: Arrays) -> Any:
    """Lowers a function for one device. Without a precision, GPUs and TPUs round float32 inputs of
    matmuls."""
    with jax.default_matmul_precision("float32" if case.dtype == "float32" else None):
        return compile_step(function, make_mesh(devices=jax.devices()[:1])).lower(*inputs)
