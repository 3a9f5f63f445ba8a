"""The command `train`."""

from __future__ import annotations

from contextlib import ExitStack

from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import Train
from transformer_jax.cli.common import join_processes, set_up
from transformer_jax.config import Config
from transformer_jax.errors import UserError
from transformer_jax.files import find_path
from transformer_jax.runs import run as runs
from transformer_jax.training import trainer
from transformer_jax.training.reporters import Reporter, TensorBoard, Terminal
from transformer_jax.user_code import is_function_name


def run(options: Train, arguments: ConfigArguments) -> None:
    """Trains with a live display."""
    join_processes(options)
    stored = None if arguments.path else _stored_config(options.run, arguments)
    config = arguments.resolve(stored)
    set_up(options.kind, config)
    with ExitStack() as stack:
        reporters: list[Reporter] = [stack.enter_context(Terminal())]
        if options.tensorboard:
            board = TensorBoard(find_path(options.run) / "tensorboard")
            reporters.append(stack.enter_context(board))
        trainer.train(
            config,
            options.run,
            new=options.new,
            init_from=options.init_from,
            profile=options.profile,
            reporters=reporters,
        )


def _stored_config(folder: str, arguments: ConfigArguments) -> Config:
    """Returns the config of the run to continue.

    UserError: there is no run, or it was trained with a kernel of the user's own. Such a name is
    loaded from the command line only, and never silently replaced by another kernel.
    """
    if not runs.exists(folder):
        raise UserError(
            f"--config: name a config file, such as configs/quickstart.py ({folder} holds no run)"
        )
    config = runs.load_config(folder)
    kernel = config.execution.kernel
    if is_function_name(kernel) and not arguments.sets("execution.kernel"):
        raise UserError(
            f"run {folder}: execution.kernel={kernel!r}: is not loaded from a file; give "
            f"--config.execution.kernel={kernel} or --config.execution.kernel=auto"
        )
    return config
