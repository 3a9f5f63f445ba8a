"""Compares kernels of attention by time, memory and error (`transformer-jax bench attention`)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from transformer_jax.attention.kernels import KERNELS, choose
from transformer_jax.benchmark import pytorch
from transformer_jax.benchmark.cases import (
    Case,
    abstract_inputs,
    attention_function,
    cases,
    draw_inputs,
)
from transformer_jax.benchmark.exact import Exact, exact
from transformer_jax.benchmark.products import floor_seconds, products_call
from transformer_jax.benchmark.programs import compile_kernel
from transformer_jax.benchmark.settings import AttentionBenchmark
from transformer_jax.benchmark.timing import Samples, Timer, time_in_turns, timer
from transformer_jax.errors import UserError
from transformer_jax.parallel.devices import shortage

MAX_SAMPLES = 15
"""Samples of each implementation at most."""
MAX_SECONDS = 3.0
"""Seconds of them, unless the fewest samples take longer."""
MAX_LENGTH_ALL_HEADS = 1024
"""The length up to which all heads are compared with float64; beyond it, the first and the last."""

Record = dict[str, Any]


class Implementation(NamedTuple):
    """A way to compute attention that is timed."""

    time: Timer
    run: Callable[[], list[Any]]
    """Returns the output and, where the case has them, the gradients of query, key and value."""
    facts: dict[str, Any]
    """What the record says of it besides its times and its error."""


def measure(settings: AttentionBenchmark, dump: Path | None = None) -> Iterator[list[Record]]:
    """Checks the settings and returns an iterator that measures case by case.

    It yields the records of a case, one for each kernel and one for PyTorch. `dump` is a folder
    for the optimized HLO of every program.
    """
    settings.validate()
    kernels = settings.kernels or supported_kernels(settings)
    check_kernels(settings, kernels)
    return _measure_cases(settings, kernels, dump)


def supported_kernels(settings: AttentionBenchmark) -> tuple[str, ...]:
    """Returns "auto" and the kernels that support every case on this platform."""

    def supported(kernel: str) -> bool:
        try:
            check_kernels(settings, (kernel,))
        except UserError:
            return False
        return True

    return ("auto", *filter(supported, KERNELS))


def check_kernels(settings: AttentionBenchmark, kernels: tuple[str, ...]) -> None:
    """Raises UserError if a kernel does not support some case. Computes nothing."""
    for case, kernel in itertools.product(cases(settings), kernels):
        jax.eval_shape(attention_function(case, kernel), *abstract_inputs(case))


def _measure_cases(
    settings: AttentionBenchmark, kernels: tuple[str, ...], dump: Path | None
) -> Iterator[list[Record]]:
    with pytorch.workers() as workers:
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
    query, key, *_ = abstract_inputs(case)
    selected = choose(query, key, case.attention_mask)
    names = dict.fromkeys(selected if name == "auto" else name for name in kernels)
    facts = {
        name: {"kernel": name, "auto": name == selected and "auto" in kernels} for name in names
    }
    # Inputs, their float32 copies and the results here; inputs and results in each worker.
    if message := shortage((3 + 2 * len(workers)) * case.input_bytes):
        return [{"does_not_fit": message} | each for each in facts.values()]
    inputs = draw_inputs(case)
    implementations: dict[str, Implementation] = {}
    unmeasured: list[Record] = []
    for name in names:
        match _prepare_kernel(case, name, inputs, dump):
            case Implementation(facts=more) as prepared:
                implementations[name] = prepared._replace(facts=facts[name] | more)
            case failure:
                unmeasured.append(failure | facts[name])
    if not implementations:
        return unmeasured
    peers, failures = _prepare_pytorch(case, workers, inputs)
    records = _time(case, implementations, peers, inputs)
    for worker in workers.values():
        with contextlib.suppress(RuntimeError):  # the process has ended, as its record says
            worker.unload()
    return unmeasured + failures + records


def _prepare_kernel(
    case: Case, kernel: str, inputs: list[jax.Array], dump: Path | None
) -> Implementation | Record:
    """Returns a compiled kernel that has run once, or a record of why it cannot be measured."""
    facts: dict[str, Any] = {}
    try:
        program = compile_kernel(case, kernel, inputs, dump)
        facts = program.facts
        if message := shortage(program.needed_bytes):
            return {"does_not_fit": message} | facts
        run = partial(_run, program.compiled, inputs)
        run()
    except (RuntimeError, ValueError) as error:  # on this device, or at this size
        return {"failed": _one_line(error)} | facts
    return Implementation(timer(run), run, facts)


def _run(compiled: Any, inputs: list[jax.Array]) -> list[jax.Array]:
    return jax.block_until_ready(compiled(*inputs))


def _prepare_pytorch(
    case: Case, workers: Mapping[str, pytorch.Worker], inputs: list[jax.Array]
) -> tuple[dict[str, Implementation], list[Record]]:
    """Returns PyTorch's attention by allocator, and the records of those that fail."""
    peers: dict[str, Implementation] = {}
    failures: list[Record] = []
    for allocator, worker in workers.items():
        try:
            worker.load(case, inputs)
            worker.run()
            facts = {"kernel": "torch", "allocator": allocator, **worker.facts}
            peers[allocator] = Implementation(worker.seconds_per_call, worker.run, facts)
        except RuntimeError as error:
            failures.append({"kernel": "torch", "allocator": allocator, "failed": _one_line(error)})
    return peers, failures


def _time(
    case: Case,
    kernels: dict[str, Implementation],
    peers: dict[str, Implementation],
    inputs: list[jax.Array],
) -> list[Record]:
    """Times kernels, PyTorch and the products in turns, and returns the records."""
    named_peers = {f"torch, {allocator}": peer for allocator, peer in peers.items()}
    timers = {name: each.time for name, each in (kernels | named_peers).items()}
    times = time_in_turns(
        timers | {"products": timer(products_call(case))}, MAX_SAMPLES, MAX_SECONDS
    )
    medians = {peer.facts["allocator"]: times[name].median for name, peer in named_peers.items()}
    fastest = min(named_peers, key=lambda name: times[name].median, default=None)
    reported = kernels
    if fastest is not None:
        peer = named_peers[fastest]
        facts = peer.facts | {"median_s_by_allocator": medians}
        reported = kernels | {fastest: peer._replace(facts=facts)}
    floor = floor_seconds(case, min(times["products"].values))
    torch = None if fastest is None else times[fastest]
    heads = 2 if case.length > MAX_LENGTH_ALL_HEADS else None
    true = exact(inputs, causal=case.mask == "causal", heads=heads)
    return [
        make_record(case, each, times[name], floor, torch, true) for name, each in reported.items()
    ]


def make_record(
    case: Case,
    implementation: Implementation,
    times: Samples,
    floor: float,
    torch: Samples | None,
    true: Exact,
) -> Record:
    """Returns what was measured of an implementation.

    ratio_to_torch is the median, over the turns, of PyTorch's time over this one's. `floor`: the
    seconds of the products alone.
    """
    ratio = None if torch is None else torch.over(times)
    return {
        "median_s": times.median,
        "spread_s": times.quartiles,
        "samples": len(times.values),
        "gflops": case.flops / times.median / 1e9,
        "share_of_products": floor / times.median,
        "ratio_to_torch": None if ratio is None else ratio.median,
        "ratio_to_torch_spread": None if ratio is None else ratio.quartiles,
        "error": true.error(implementation.run()),
    } | implementation.facts


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
