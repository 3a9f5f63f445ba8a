"""Compiles a kernel for a case and reports what it needs before it runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import jax

from transformer_jax.benchmark.cases import Case, attention_function
from transformer_jax.flops import largest_product
from transformer_jax.parallel.compile import compile_step
from transformer_jax.parallel.mesh import make_mesh


class Program(NamedTuple):
    """A compiled function of arrays."""

    compiled: Any
    facts: dict[str, Any]
    """Seconds of compilation and bytes of memory, for the record."""
    needed_bytes: int
    """The least memory that a call allocates."""


def compile_kernel(
    case: Case, kernel: str, inputs: list[jax.Array], dump: Path | None = None
) -> Program:
    """Compiles attention by a kernel, and writes its optimized HLO into the folder `dump`.

    XLA hands some products, with the operations that follow them, to libraries whose memory it
    does not report. If its temporaries are smaller than the largest product, that has happened:
    temporaries_bytes is None.
    """
    function = attention_function(case, kernel)
    with jax.default_matmul_precision(case.precision):
        lowered = compile_step(function, one_device()).lower(*inputs)
        start = time.perf_counter()
        compiled = lowered.compile()
        compile_s = time.perf_counter() - start
    if dump is not None:
        name = "-".join(map(str, (kernel.replace(":", "."), *case.labels().values())))
        (dump / f"{name}.hlo.txt").write_text(compiled.as_text(), "utf-8")
    memory = compiled.memory_analysis()
    reported, product = memory.temp_size_in_bytes, largest_product(function, *inputs)
    facts = {
        "compile_s": compile_s,
        "temporaries_bytes": reported if reported >= product else None,
        "input_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
    }
    return Program(compiled, facts, max(reported, product) + memory.output_size_in_bytes)


def one_device() -> jax.sharding.Mesh:
    """Returns a mesh of the first device alone."""
    return make_mesh(devices=jax.devices()[:1])
