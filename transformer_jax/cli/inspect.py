"""The command `inspect`."""

from __future__ import annotations

import json

from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import Inspect
from transformer_jax.cli.common import set_up
from transformer_jax.config import Config, to_json
from transformer_jax.models.make import count_parameters
from transformer_jax.printable import printable
from transformer_jax.runs import checkpoint
from transformer_jax.runs import run as runs
from transformer_jax.text.tokenizer import Tokenizers
from transformer_jax.training.planning import programs, state_bytes
from transformer_jax.training.setup import check_config, prepare

_MIB = 2**20


def run(options: Inspect, arguments: ConfigArguments) -> None:
    """Prints the config and what training takes; for a run, first what needs no data."""
    known = None if options.run is None else runs.load(options.run)
    config = arguments.resolve(None if known is None else known.config)
    set_up(options.kind, config)
    check_config(config)
    for line in json.dumps(to_json(config), indent=1, ensure_ascii=False).split("\n"):
        print(printable(line))
    if known is not None:
        steps = checkpoint.steps(known.checkpoints)
        print(f"checkpoints {', '.join(map(str, steps)) or 'none'}")
        _print_sizes(config, known.tokenizers)
    setup = prepare(config, known)
    if known is None:
        _print_sizes(config, setup.tokenizers)
    print(f"corpus      {setup.examples.report}")
    for name, dev in setup.dev.items():
        print(f"            {printable(name)}: {dev.examples.report}")
    loader = setup.loader
    filled = f"{loader.non_padding_fraction:.1%} of slots filled"
    print(f"batches     {loader.batches_per_epoch:,} an epoch, {filled}")
    print(f"programs    {len(loader.shapes)} training steps, one for each shape of a batch:")
    for shape, temporaries in programs(setup):
        size = f"{shape.rows:>5} rows x {shape.source:>3} source x {shape.target:>3} target"
        print(f"            {size}  {temporaries / _MIB:>9,.1f} MiB of temporaries")
    held = state_bytes(setup) / _MIB
    print(f"memory      {held:,.1f} MiB of parameters and optimizer state on each device")


def _print_sizes(config: Config, tokenizers: Tokenizers) -> None:
    sizes = tokenizers.source.size, tokenizers.target.size
    print(f"vocabulary  {sizes[0]:,} source, {sizes[1]:,} target ids")
    print(f"parameters  {count_parameters(config.model, *sizes):,}")
