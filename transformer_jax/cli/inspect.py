"""The command `inspect`."""

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import jax

from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import Inspect
from transformer_jax.cli.common import load_user_code, run_and_config
from transformer_jax.config import Config, describe, to_json
from transformer_jax.data.buckets import Shape
from transformer_jax.data.loader import Loader
from transformer_jax.data.order import describe_mixture
from transformer_jax.errors import UserError, printable
from transformer_jax.interop.formats import describe_formats
from transformer_jax.models.make import count_parameters
from transformer_jax.parallel.mesh import topology_devices
from transformer_jax.runs import checkpoint
from transformer_jax.runs.run import Run
from transformer_jax.text.corpus import Corpora
from transformer_jax.text.summary import summarize
from transformer_jax.training.planning import Planner, device_memory, remedies
from transformer_jax.training.setup import TrainingData, check_config, load_data


def run(options: Inspect, arguments: ConfigArguments) -> None:
    """Prints the config and what training takes; for a run, first what needs no data.

    For a config alone, the data are checked before anything is printed.
    """
    trained, config = run_and_config(options.run, arguments)
    load_user_code(options, config)  # programs are not cached: their compilation is timed
    if options.topology is not None and config.execution.kernel == "auto":
        # It chooses for the devices here, and for accelerators this one.
        config = config.changed(execution={"kernel": "xla"})
    devices = _devices(options)
    number = len(devices) if isinstance(devices, list) else devices
    check_config(config, number)
    if options.json:
        print(json.dumps(to_json(config), indent=1))
        return
    if options.compile and config.execution.executor == "pmap":
        raise UserError("--compile: needs execution.executor=jit, not pmap")
    memory = None if options.device_memory is None else _size(options.device_memory)
    shapes = None if options.length is None else [_full_batch(config, options.length)]
    tokenizers = None if trained is None else trained.tokenizers
    ids = config.tokenizer.vocabulary
    sizes = (ids, ids) if tokenizers is None else tokenizers.sizes
    if trained is not None or shapes is not None:
        _print_config(config, sizes, trained)
    if shapes is None and not config.data.train:  # a model that was trained elsewhere
        print("corpus      none (data.train); --length plans a batch without one")
        return
    if shapes is None:
        data = load_data(config, tokenizers)
        loader = Loader(data.examples, config)
        sizes, shapes = data.tokenizers.sizes, loader.shapes
        if trained is None:
            _print_config(config, sizes)
        _print_data(data, loader, config)
    _print_plan(Planner(config, sizes, devices), shapes, memory, options.compile)


def _full_batch(config: Config, length: int) -> Shape:
    """Returns the shape of a batch of `data.batch_tokens`, all of whose sides have `length` tokens.

    UserError: the model is shorter, or no row fits.
    """
    longest = min(config.model.max_length, config.data.batch_tokens)
    if not 1 <= length <= longest:
        raise UserError(
            f"--length={length}: must be from 1 to {longest}, model.max_length or data.batch_tokens"
        )
    return Shape(config.data.batch_tokens // length, length, length)


def _size(size: str) -> int:
    """Returns the bytes of a size such as 80GiB. UserError: it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(MiB|GiB)", size)
    if match is None or not float(match[1]):
        raise UserError(f"--device-memory={size}: must be a size such as 80GiB or 512MiB")
    return int(float(match[1]) * {"MiB": 2**20, "GiB": 2**30}[match[2]])


def _print_data(data: TrainingData, loader: Loader, config: Config) -> None:
    print(f"corpus      {data.examples.report}")
    for line in describe_mixture(data.examples.sizes, config.data):
        print(f"            {printable(line)}")
    for name, dev in data.dev.items():
        print(f"            {printable(name)}: {dev.examples.report}")
    for line in summarize(Corpora.of(config.data), data.tokenizers, limit=None):
        print(f"            {printable(line)}")
    filled = f"{loader.non_padding_fraction:.1%} of slots filled"
    print(f"batches     {loader.batches_per_epoch:,} an epoch, {filled}")


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


def _print_plan(
    planner: Planner, shapes: Sequence[Shape], memory: int | None, compiles: bool
) -> None:
    """Prints the operations of the step of each shape, and the memory of each device.

    memory: bytes of a device; None: as far as it is known, those of the devices.
    """
    mesh = planner.setup.mesh
    params, rest, *_ = map(_mib, planner.memory(shapes[0]))
    print(f"devices     {planner.setup.describe_devices()}; on each of them:")
    print(f"state       {params} MiB of parameters, {rest} MiB of other state")
    print(f"steps       {len(shapes)}, one for each shape of a batch:")
    names = ("rows", "source", "target", "GFLOP", "batch, MiB", "temporaries, MiB")
    print("            " + "  ".join(names) + ("  compiled in, s" if compiles else " (estimated)"))
    needs: dict[Shape, int] = {}
    for shape in shapes:
        needed, seconds = planner.compiled(shape) if compiles else (planner.memory(shape), 0.0)
        full, needs[shape] = planner.shape(shape), sum(needed)
        gflop = f"{planner.flops(shape) / 1e9:,.1f}"
        cells = [*map(str, full), gflop, _mib(needed.batch), _mib(needed.temporaries)]
        cells += [f"{seconds:.1f}"] if compiles else []
        widths = [*map(len, names), len("compiled in, s")]
        print("            " + "  ".join(map(str.rjust, cells, widths)))
    largest, limit = max(needs, key=needs.__getitem__), memory or device_memory(mesh)
    fits = limit == 0 or needs[largest] <= limit
    there = f"of {_mib(limit)} MiB" if limit else "of an unknown size"
    print(f"memory      {'' if fits else 'does not fit: '}{_mib(needs[largest])} MiB {there}")
    if not fits:
        _print_remedies(planner, shapes, limit, compiles)


def _print_remedies(planner: Planner, shapes: Sequence[Shape], limit: int, compiles: bool) -> None:
    """Prints the three cheapest changes of the config with which the step fits."""
    cheapest = list(itertools.islice(remedies(planner, shapes, limit, compiles), 3))
    for option, needed, operations in cheapest:
        print(f"            {option}: {_mib(needed)} MiB, {operations:.2f} times the operations")
    if not cheapest:
        print("            no single change of accumulation, fsdp, remat or rows makes it fit")


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"


def _print_config(config: Config, vocabularies: tuple[int, int], run: Run | None = None) -> None:
    for line in describe(config):
        print(printable(line))
    if run is not None:
        print(f"checkpoints {', '.join(map(str, checkpoint.steps(run.checkpoints))) or 'none'}")
    print("vocabulary  {:,} source, {:,} target ids".format(*vocabularies))
    print(f"parameters  {count_parameters(config.model, *vocabularies):,}")
    print(f"export      {describe_formats(config.model)}")
