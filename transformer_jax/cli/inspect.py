"""The command `inspect`."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import jax

from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import Inspect
from transformer_jax.cli.common import load_user_code
from transformer_jax.config import Config, describe, require_decided, to_json
from transformer_jax.data.buckets import Shape
from transformer_jax.data.loader import Loader
from transformer_jax.data.order import describe_mixture
from transformer_jax.errors import UserError, printable
from transformer_jax.interop.formats import describe_formats
from transformer_jax.models.make import count_parameters
from transformer_jax.parallel.mesh import topology_devices
from transformer_jax.runs import checkpoint
from transformer_jax.runs import run as runs
from transformer_jax.text.corpus import Corpora
from transformer_jax.text.summary import summarize
from transformer_jax.text.tokenizer import Tokenizers
from transformer_jax.training.planning import Planner, device_memory, for_other_devices, remedies
from transformer_jax.training.setup import check_config, load_data


def run(options: Inspect, arguments: ConfigArguments) -> None:
    """Prints the config and what training takes; for a run, first what needs no data.

    For a config alone, the data are checked before anything is printed.
    """
    trained = None if options.run is None else runs.load(options.run)
    config = arguments.resolve(None if trained is None else trained.config)
    if trained is not None:
        require_decided(f"run {trained.folder}", trained.config, config)
    load_user_code(options, config)  # programs are not cached: their compilation is timed
    config = config if options.topology is None else for_other_devices(config)
    devices = _devices(options)
    number = len(devices) if isinstance(devices, list) else devices
    check_config(config, number)
    if options.json:
        print(json.dumps(to_json(config), indent=1))
        return
    if options.compile and config.execution.executor == "pmap":
        raise UserError("--compile: needs execution.executor=jit, not pmap")
    if trained is not None:
        _print_config(config)
        steps = checkpoint.steps(trained.checkpoints)
        print(f"checkpoints {', '.join(map(str, steps)) or 'none'}")
        _print_sizes(config, trained.tokenizers)
    data = load_data(config, None if trained is None else trained.tokenizers)
    loader = Loader(data.examples, config)
    if trained is None:
        _print_config(config)
        _print_sizes(config, data.tokenizers)
    print(f"corpus      {data.examples.report}")
    for line in describe_mixture(data.examples.sizes, config.data):
        print(f"            {printable(line)}")
    for name, dev in data.dev.items():
        print(f"            {printable(name)}: {dev.examples.report}")
    for line in summarize(Corpora.of(config.data), data.tokenizers, limit=None):
        print(f"            {printable(line)}")
    filled = f"{loader.non_padding_fraction:.1%} of slots filled"
    print(f"batches     {loader.batches_per_epoch:,} an epoch, {filled}")
    planner = Planner(config, data.tokenizers.sizes, devices)
    _print_plan(planner, loader.shapes, options.compile)


def _devices(options: Inspect) -> int | list[Any] | None:
    """Returns the devices to plan for, as for `Planner`. UserError: they cannot be had."""
    if options.topology is not None:
        if options.devices is not None:
            raise UserError("--topology: has its own number of devices; leave out --devices")
        return topology_devices(options.topology)
    if options.devices is None or options.devices == jax.device_count():
        return None
    if options.devices < 1:
        raise UserError(f"--devices={options.devices}: must be at least 1")
    if options.compile:
        raise UserError(
            f"--devices={options.devices}: there are {jax.device_count()} here to compile for; "
            "leave out --compile, or name a TPU slice with --topology"
        )
    return options.devices


def _print_plan(planner: Planner, shapes: Sequence[Shape], compiles: bool) -> None:
    """Prints the operations of the step of each shape, and the memory of each device."""
    mesh = planner.setup.mesh
    held = planner.memory(shapes[0])
    print(f"devices     {planner.setup.describe_devices()}; on each of them:")
    print(
        f"state       {_mib(held.params)} MiB of parameters, {_mib(held.rest)} MiB of other state"
    )
    print(f"steps       {len(shapes)}, one for each shape of a batch:")
    names = ("rows", "source", "target", "GFLOP", "batch, MiB", "temporaries, MiB")
    print("            " + "  ".join(names) + ("  compiled in, s" if compiles else " (estimated)"))
    needs: dict[Shape, int] = {}
    for shape in shapes:
        memory, seconds = planner.compiled(shape) if compiles else (planner.memory(shape), 0.0)
        full, needs[shape] = planner.shape(shape), sum(memory)
        gflop = f"{planner.flops(shape) / 1e9:,.1f}"
        cells = [*map(str, full), gflop, _mib(memory.batch), _mib(memory.temporaries)]
        cells += [f"{seconds:.1f}"] if compiles else []
        widths = [*map(len, names), len("compiled in, s")]
        print("            " + "  ".join(map(str.rjust, cells, widths)))
    largest, limit = max(needs, key=needs.__getitem__), device_memory(mesh)
    fits = limit == 0 or needs[largest] <= limit
    there = f"of {_mib(limit)} MiB" if limit else "of an unknown size"
    print(f"memory      {'' if fits else 'does not fit: '}{_mib(needs[largest])} MiB {there}")
    if not fits:
        _print_remedies(planner, shapes, limit, compiles)


def _print_remedies(planner: Planner, shapes: Sequence[Shape], limit: int, compiles: bool) -> None:
    """Prints the three cheapest changes of the config with which the step fits."""
    cheapest = list(itertools.islice(remedies(planner, shapes, limit, compiles), 3))
    for remedy in cheapest:
        print(
            f"            {remedy.option}: {_mib(remedy.memory)} MiB, "
            f"{remedy.operations:.2f} times the operations"
        )
    if not cheapest:
        print("            no single change of accumulation, fsdp, remat or rows makes it fit")


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"


def _print_config(config: Config) -> None:
    for line in describe(config):
        print(printable(line))


def _print_sizes(config: Config, tokenizers: Tokenizers) -> None:
    source, target = tokenizers.sizes
    print(f"vocabulary  {source:,} source, {target:,} target ids")
    print(f"parameters  {count_parameters(config.model, source, target):,}")
    print(f"export      {describe_formats(config.model)}")
