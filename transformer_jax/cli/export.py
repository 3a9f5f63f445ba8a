"""The commands `export` and `average`, which write a model that others can use."""

import tempfile
from pathlib import Path

from transformer_jax.cli.commands import Average, Export
from transformer_jax.cli.common import load_user_code
from transformer_jax.errors import UserError
from transformer_jax.files import local_path
from transformer_jax.interop.formats import FORMATS
from transformer_jax.models.make import abstract_params
from transformer_jax.runs import run as runs


def export(options: Export) -> None:
    """Writes the model to a folder, whole or not at all."""
    folder = local_path(options.out, "--out")
    if folder.exists():
        raise UserError(f"--out={folder}: exists already; name a new folder")
    loaded = runs.load(options.run)
    load_user_code(options, loaded.config)
    loaded.require_float32()
    format, model = FORMATS[options.format], loaded.config.model
    format.check(model)
    step = loaded.best_step() if options.step is None else options.step
    params = loaded.params(step, abstract_params(model, *loaded.tokenizers.sizes))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export.", dir=folder.parent) as unfinished:
        format.export(loaded, step, params, Path(unfinished, "model"))
        Path(unfinished, "model").rename(folder)
    print(f"{folder}: {options.format} of {loaded.folder}")


def average(options: Average) -> None:
    """Creates a run of averaged parameters."""
    source = runs.load(options.run)
    steps = list(options.steps) or _newest(source, options.last)
    runs.average(source, steps, options.out)
    print(f"{options.out}: average of steps {', '.join(map(str, steps))}")


def _newest(source: runs.Run, count: int | None) -> list[int]:
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
