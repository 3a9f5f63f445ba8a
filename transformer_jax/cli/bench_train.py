"""The command `bench train`."""

import sys
import tempfile
from collections.abc import Iterator

import jax

from transformer_jax.benchmark import results
from transformer_jax.benchmark.training import PRESETS, Record, full_rows, measure, real_text
from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import BenchTrain
from transformer_jax.cli.common import load_user_code
from transformer_jax.data.buckets import Shape
from transformer_jax.errors import UserError
from transformer_jax.files import local_path


def run(options: BenchTrain, arguments: ConfigArguments) -> None:
    """Measures, prints a table, and writes what `--out` asks for."""
    if options.preset is not None and arguments.path is not None:
        raise UserError(f"--preset={options.preset}: in place of --config; give one of them")
    for name in ("rows", "length", "text", "samples"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name}={value}: must be at least 1")
    if options.out is not None:
        local_path(options.out, "--out").parent.mkdir(parents=True, exist_ok=True)
    config = arguments.resolve(PRESETS[options.preset] if options.preset else None)
    load_user_code(options, config)
    shape = Shape(options.rows, options.length, options.length)
    work = full_rows(config, shape) if options.text is None else real_text(config, options.text)
    with tempfile.TemporaryDirectory() as folder:  # a first step is timed without and with a cache
        jax.config.update("jax_compilation_cache_dir", folder)
        record = measure(work, options.samples)
    print(*table(record), sep="\n")
    if options.out is not None:
        command = " ".join(["transformer-jax bench train", *sys.argv[3:]])
        results.write(options.out.stem, command, record, options.out.parent)


def table(record: Record) -> Iterator[str]:
    """Yields the lines that show a record."""
    shapes = ", ".join("x".join(map(str, shape)) for shape in record["shapes"])
    step, passes, first = record["step"], record["batches"], record["first_step_s"]
    yield f"{record['devices']}; {record['parameters']:,} parameters"
    yield f"{passes} batches of {shapes}; {record['fill']:.1%} of target slots filled"
    yield f"{'':<28} ms a batch  target tokens/s"
    yield _line("step", step["median_s"] / passes, step)
    for part in ("forward", "backward", "optimizer"):
        yield _line(f"  {part}", record[f"{part}_s"] / passes)
    if record["matmuls_s"] is not None:
        share = f"{record['share_of_matmuls']:.0%} of the step"
        yield _line("matmuls alone", record["matmuls_s"] / passes) + f"  {share}"
    for peer in record["pytorch"]:
        name = f"PyTorch, {peer['way']}, {peer['allocator']}"
        if "failed" in peer:
            yield f"{name}: failed: {peer['failed']}"
        else:
            low, high = peer["ratio_spread"]
            ratio = f"this is {peer['ratio']:.2f} times as fast ({low:.2f}-{high:.2f})"
            yield _line(name, peer["median_s"] / peer["batches"], peer) + f"  {ratio}"
    if not record["pytorch"]:
        yield "PyTorch: not installed; pip install torch, to compare with it"
    yield f"first step                   {first['compiled']:.1f} s; {first['cached']:.1f} s cached"
    state, more, peak = (record[f"{name}_mib"] for name in ("state", "temporaries", "peak"))
    memory = f"{state:,.0f} of state and batch, {more:,.0f} of temporaries; peak {peak:,.0f}"
    yield f"memory, MiB                  {memory}"


def _line(name: str, seconds: float, rates: Record | None = None) -> str:
    rate = f"{rates['tokens_per_s']:>15,.0f}" if rates else ""
    return f"{name:<28} {seconds * 1e3:>10,.1f}  {rate}".rstrip()
