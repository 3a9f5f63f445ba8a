"""The command `average`."""

from __future__ import annotations

from transformer_jax.cli.commands import Average
from transformer_jax.errors import UserError
from transformer_jax.runs import run as runs
from transformer_jax.runs.run import Run


def run(options: Average) -> None:
    """Creates a run of averaged parameters."""
    source = runs.load(options.run)
    steps = list(options.steps) or _newest(source, options.last)
    runs.average(source, steps, options.out)
    print(f"{options.out}: average of steps {', '.join(map(str, steps))}")


def _newest(source: Run, count: int | None) -> list[int]:
    """Returns the steps of the `count` newest checkpoints. UserError: the run keeps fewer."""
    steps = source.newest_steps()
    if count is None:
        return steps
    if count < 1:
        raise UserError(f"--last={count}: must be at least 1")
    if count > len(steps):
        names = f" ({', '.join(map(str, steps))})" if steps else ""
        raise UserError(
            f"--last={count}: the run keeps {len(steps)} newest checkpoints{names}; ask for fewer, "
            "name them with --steps, or train with a larger train.keep"
        )
    return steps[-count:]
