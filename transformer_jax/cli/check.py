"""The command `check`."""

import sys

from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import Check
from transformer_jax.cli.common import run_and_config, set_up
from transformer_jax.errors import printable
from transformer_jax.training.checks import check


def run(options: Check, arguments: ConfigArguments) -> None:
    """Prints a line for each check. Exits with status 1 if one fails."""
    loaded, config = run_and_config(options.run, arguments)
    set_up(options, config)
    failed = []
    for each in check(config, None if loaded is None else loaded.tokenizers, options.modules):
        if each.difference is None:
            print(f"left out  {each.name:<22}{printable(each.about)}", flush=True)
            continue
        failed += [] if each.passed else [each.name]
        outcome = f"{each.difference:.1e}, at most {each.limit:.0e}  {printable(each.about)}"
        print(f"{'ok' if each.passed else 'FAILED':<10}{each.name:<22}{outcome}", flush=True)
    if failed:
        sys.exit(1)
