"""Attention kernels side by side: time, memory and error (`transformer-jax bench attention`).

Arrays are [B, N, T, H], as `attend` receives them in the model. Kernels and PyTorch's take turns.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import parallel
from transformer_jax.allocator import give_memory_back
from transformer_jax.attention import Mask, attend
from transformer_jax.attention.kernels import KERNELS, choose
from transformer_jax.benchmark import attention_report, results
from transformer_jax.benchmark.exact import exact
from transformer_jax.benchmark.flops import largest_product
from transformer_jax.benchmark.timing import in_turns
from transformer_jax.commands import look_here
from transformer_jax.options import BenchAttention

SAMPLES = 15
"""Timings of each kernel at most."""
ALL_S = 3.0
"""So many seconds of them, if the least of timings take no longer."""
USABLE = 0.6
"""Of the host's free memory. A program that needs 80 % of it has been killed for lack of memory."""
BLOCK, STEPS = 2**20, 16
"""Scores of a step of the products that are measured alone, and such steps."""
ALL_HEADS_TO = 1024
"""The length up to which every head is compared with float64; beyond, the first and the last."""


class Case(NamedTuple):
    """What is measured of every kernel."""

    dtype: str
    batch: int
    mask: str
    length: int
    direction: str


class Contender(NamedTuple):
    """Something to time: it returns the output, and the gradients where the case has them."""

    call: Callable[[], list[Any]]
    facts: dict[str, Any]


def bench(options: BenchAttention) -> None:
    """Measures, prints a table as it goes, and writes what `--out` and `--dump` ask for."""
    look_here(options.kernels)
    kernels = options.kernels or usable(options)
    check(options, kernels)
    for folder in (options.out and options.out.parent, options.dump):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = []
    # Once for nothing: PyTorch's threads and JAX's take a while to get out of each other's way.
    shortest = min(cases(options), key=lambda case: case.length)
    list(measure(shortest._replace(direction="both"), kernels, options))
    for case in cases(options):
        # What has been measured is written after each case, since the last take longest.
        for record in measure(case, kernels, options):
            records.append(case._asdict() | record)
            attention_report.print_record(*records[-1:], *(records[-2:-1] or [None]))
        if options.out is not None:
            _write(options, options.out, records)


def _write(options: BenchAttention, out: Path, records: list[dict[str, Any]]) -> None:
    """`out`.json and the plot `out`.svg; `out` may name either."""
    from transformer_jax import plot

    sizes = {name: getattr(options, name) for name in ("heads", "key_heads", "head_size")}
    found = sizes | attention_report.summary(records) | {"records": records}
    command = " ".join(["transformer-jax bench attention", *sys.argv[3:]])
    name = out.stem if out.suffix in (".json", ".svg") else out.name
    results.write(name, command, found, out.parent)
    if any("median_s" in record for record in records):
        plot.save(plot.scaling(attention_report.curves(records)), out.parent / f"{name}.svg")


def cases(options: BenchAttention) -> Iterator[Case]:
    """Every case, small lengths first."""
    directions = ("forward", "both")
    for case in itertools.product(
        options.dtypes, options.batches, options.masks, options.lengths, directions
    ):
        yield Case(*case)


def shapes(case: Case, options: BenchAttention) -> list[tuple[int, ...]]:
    """Of query, key, value, and the output's gradient."""
    shared = options.key_heads or options.heads
    tail = (case.length, options.head_size)
    query, key = (case.batch, options.heads, *tail), (case.batch, shared, *tail)
    return [query, key, key, query]


def draw(case: Case, options: BenchAttention) -> list[jax.Array]:
    """Normal query, key, value, and the output's gradient."""
    keys = jax.random.split(jax.random.key(0), 4)
    dtype = jnp.dtype(case.dtype)
    sizes = shapes(case, options)
    return [jax.random.normal(k, shape, dtype) for k, shape in zip(keys, sizes, strict=True)]


def function(case: Case, kernel: str) -> Callable[..., list[jax.Array]]:
    """Attention by the kernel: query, key, value, gradient -> output, and gradients of the three
    in the direction "both"."""
    run = partial(attend, mask=_mask(case), kernel=kernel)

    def forward(query: jax.Array, key: jax.Array, value: jax.Array, _: jax.Array) -> list:
        return [run(query, key, value)[0]]

    def both(query: jax.Array, key: jax.Array, value: jax.Array, gradient: jax.Array) -> list:
        output, back = jax.vjp(lambda *x: run(*x)[0], query, key, value)
        return [output, *back(gradient)]

    return both if case.direction == "both" else forward


def _mask(case: Case) -> Mask | None:
    return Mask(causal=True) if case.mask == "causal" else None


def usable(options: BenchAttention) -> tuple[str, ...]:
    """`auto` and all kernels that can do every case here."""

    def can(kernel: str) -> bool:
        try:
            check(options, (kernel,))
        except ValueError:
            return False
        return True

    return ("auto", *filter(can, KERNELS))


def check(options: BenchAttention, kernels: tuple[str, ...]) -> None:
    """ValueError: sizes or a kernel with which some case cannot be computed, or no way to plot."""
    if options.out is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--out: the plot needs matplotlib; pip install 'transformer-jax[plot]'")
    for name in ("heads", "head_size", *(["key_heads"] if options.key_heads is not None else [])):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag}={getattr(options, name)}: must be at least 1")
    for name in ("lengths", "batches"):
        given = getattr(options, name)
        if min(given, default=0) < 1:
            raise ValueError(f"--{name} {' '.join(map(str, given))}: must be numbers of at least 1")
    if options.key_heads is not None and options.heads % options.key_heads:
        raise ValueError(f"--key-heads={options.key_heads}: must divide --heads={options.heads}")
    for case, kernel in itertools.product(cases(options), kernels):
        sizes = [jax.ShapeDtypeStruct(s, jnp.dtype(case.dtype)) for s in shapes(case, options)]
        jax.eval_shape(function(case, kernel), *sizes)


def measure(
    case: Case, kernels: tuple[str, ...], options: BenchAttention
) -> Iterator[dict[str, Any]]:
    """A record of each kernel and of PyTorch's."""
    sizes = shapes(case, options)
    itemsize = jnp.dtype(case.dtype).itemsize
    inputs_bytes = itemsize * sum(map(np.prod, sizes))
    auto = choose(sizes[0], sizes[1], _mask(case))
    named = {
        kernel: {"auto": kernel == auto and "auto" in kernels}
        for kernel in dict.fromkeys(auto if kernel == "auto" else kernel for kernel in kernels)
    }
    if lacks := _lacks(int(3 * inputs_bytes)):  # for the arrays, a copy, and PyTorch's
        yield from (
            {"kernel": name, "does_not_fit": lacks} | facts for name, facts in named.items()
        )
        return
    arrays = draw(case, options)
    contenders: dict[str, Contender] = {}
    for kernel, facts in named.items():
        try:
            compiled, more, needed = _compile(case, kernel, arrays, options.dump)
            facts |= more
            if lacks := _lacks(needed):
                yield {"kernel": kernel, "does_not_fit": lacks} | facts
                continue
            contenders[kernel] = Contender(partial(_wait, compiled, arrays), facts)
            contenders[kernel].call()
        except (RuntimeError, ValueError) as error:  # on this device, or at this size
            contenders.pop(kernel, None)
            yield {"kernel": kernel, "failed": _why(error)} | facts
    if not contenders:
        return
    try:
        pytorch = _pytorch(case, arrays, options)
        for contender in pytorch.values():
            contender.call()
        contenders |= pytorch
    except RuntimeError as error:
        yield {"kernel": "torch", "failed": _why(error)}
    measured = contenders | {"products": _products(case, options)}
    times = in_turns({name: c.call for name, c in measured.items()}, SAMPLES, ALL_S)
    yield from _records(case, options, contenders, times, arrays)


def _why(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _records(
    case: Case,
    options: BenchAttention,
    contenders: dict[str, Contender],
    times: dict[str, list[float]],
    arrays: list[jax.Array],
) -> Iterator[dict[str, Any]]:
    heads = 2 if case.length > ALL_HEADS_TO else None
    true = exact(arrays, causal=case.mask == "causal", heads=heads)
    flops = _flops(case, options)
    floor = _floor(case, options, min(times["products"]))
    torch_s = statistics.median(times["torch"]) if "torch" in times else None
    for name, contender in contenders.items():
        taken = sorted(times[name])
        median = statistics.median(taken)
        yield {
            "kernel": name,
            "median_s": median,
            "spread_s": [taken[len(taken) // 4], taken[-1 - len(taken) // 4]],
            "samples": len(taken),
            "gflops": flops / median / 1e9,
            "share_of_products": floor / median,
            "ratio_to_torch": None if torch_s is None else torch_s / median,
            "error": true.error(contender.call()),
        } | contender.facts


def _compile(
    case: Case, kernel: str, arrays: list[jax.Array], dump: Path | None
) -> tuple[Any, dict[str, Any], int]:
    """The compiled program, what is known of it before it runs, and bytes that it needs at least.

    Where its temporaries are less than a product that it computes, a library computes that with
    what follows, and does not tell the compiler what memory it takes: the record has None.
    """
    with jax.default_matmul_precision(_precision(case)):
        lowered = parallel.compile(function(case, kernel), _one_device()).lower(*arrays)
        began = time.perf_counter()
        compiled = lowered.compile()
        compile_s = time.perf_counter() - began
    if dump is not None:
        name = "-".join(map(str, (kernel.replace(":", "."), *case)))
        (dump / f"{name}.hlo.txt").write_text(compiled.as_text(), "utf-8")
    memory = compiled.memory_analysis()
    told, product = memory.temp_size_in_bytes, largest_product(function(case, kernel), *arrays)
    facts = {
        "compile_s": compile_s,
        "temporaries_bytes": told if told >= product else None,
        "input_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
    }
    return compiled, facts, max(told, product) + memory.output_size_in_bytes


def _precision(case: Case) -> str | None:
    """GPUs and TPUs round the products of float32 otherwise."""
    return "float32" if case.dtype == "float32" else None


def _one_device() -> jax.sharding.Mesh:
    return parallel.make_mesh(jax.devices()[:1])


def _wait(compiled: Any, arrays: list[jax.Array]) -> list[jax.Array]:
    return jax.block_until_ready(compiled(*arrays))


def _pytorch(case: Case, arrays: list[jax.Array], options: BenchAttention) -> dict[str, Contender]:
    """PyTorch's `scaled_dot_product_attention`, where it is installed and has the same device."""
    if importlib.util.find_spec("torch") is None:
        return {}
    torch: Any = importlib.import_module("torch")
    on_gpu = jax.default_backend() == "gpu"
    if jax.default_backend() == "tpu" or (on_gpu and not torch.cuda.is_available()):
        return {}
    dtype = getattr(torch, case.dtype)
    tensors = [
        torch.from_numpy(np.array(x.astype(jnp.float32))).to("cuda" if on_gpu else "cpu", dtype)
        for x in arrays
    ]
    attention = partial(
        torch.nn.functional.scaled_dot_product_attention,
        is_causal=case.mask == "causal",
        enable_gqa=options.key_heads is not None,
    )

    def forward() -> list[Any]:
        with torch.no_grad():
            output = attention(*tensors[:3])
        return finished([output])

    def both() -> list[Any]:
        inputs = [x.detach().requires_grad_() for x in tensors[:3]]
        output = attention(*inputs)
        output.backward(tensors[3])
        return finished([output, *(x.grad for x in inputs)])

    def finished(found: list[Any]) -> list[Any]:
        if on_gpu:
            torch.cuda.synchronize()
        return [x.detach() for x in found]

    return {"torch": Contender(both if case.direction == "both" else forward, {})}


def _products(case: Case, options: BenchAttention) -> Contender:
    """Both products of attention with no softmax between them, of so many queries that what a call
    costs is nothing beside them: the rate that attention could have at this length and width."""
    keys = jnp.ones((case.length, options.head_size), case.dtype)
    query = jnp.ones((_product_rows(case), options.head_size), case.dtype)

    def products(query: jax.Array, keys: jax.Array, steps: jax.Array) -> list[jax.Array]:
        def step(total: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
            moved = query + index.astype(query.dtype)  # so that no step is that before it
            return total + (moved @ keys.T) @ keys, None

        return [jax.lax.scan(step, query, steps)[0]]

    arrays = [query, keys, jnp.arange(STEPS)]
    with jax.default_matmul_precision(_precision(case)):
        compiled = parallel.compile(products, _one_device()).lower(*arrays).compile()
    return Contender(partial(_wait, compiled, arrays), {})


def _product_rows(case: Case) -> int:
    """Queries of a step of `_products`."""
    return max(1, BLOCK // case.length)


def _floor(case: Case, options: BenchAttention, fastest: float) -> float:
    """Seconds of the products alone at the rate of `_products`, whose fastest call took so long.

    Forward two of them; backward four more. A causal mask needs half of each.
    """
    a_query = fastest / (STEPS * _product_rows(case))
    pairs = 3 if case.direction == "both" else 1
    return pairs * a_query * case.length * case.batch * options.heads * _seen(case)


def _flops(case: Case, options: BenchAttention) -> float:
    """Of the products: two forward, four backward, 2 · T · S · H for each head."""
    products = 6 if case.direction == "both" else 2
    each = 2 * case.length**2 * options.head_size * case.batch * options.heads
    return products * each * _seen(case)


def _seen(case: Case) -> float:
    """The share of scores that the mask leaves."""
    return (case.length + 1) / (2 * case.length) if case.mask == "causal" else 1.0


def _available() -> int:
    """Bytes of the host's memory that a program may ask for: freed memory that the allocator keeps
    is in pieces, so that not all of what is free can be had."""
    give_memory_back()
    return int(USABLE * _free())


def _free() -> int:
    info = Path("/proc/meminfo")
    if info.exists():
        fields = dict(line.split(":") for line in info.read_text("utf-8").splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _lacks(needed: int) -> str | None:
    """Why so many bytes more cannot be had; None: they can."""
    device = jax.devices()[0]
    stats = device.memory_stats()
    free = stats["bytes_limit"] - stats["bytes_in_use"] if stats else _available()
    return f"needs {needed:,} bytes, {free:,} can be had" if needed > free else None
