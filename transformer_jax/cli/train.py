"""The command `train`."""

from contextlib import ExitStack

from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import Train
from transformer_jax.cli.common import join_processes, set_up
from transformer_jax.config import Config
from transformer_jax.errors import UserError
from transformer_jax.files import find_path
from transformer_jax.runs import card
from transformer_jax.runs import run as runs
from transformer_jax.training import trainer
from transformer_jax.training.reporters import Reporter, TensorBoard, Terminal, guarded
from transformer_jax.user_code import load_function, search_current_folder


def run(options: Train, arguments: ConfigArguments) -> None:
    """Trains with a live display."""
    join_processes(options)
    loaded = _load_card(options, arguments)
    config = _config(options, arguments, loaded)
    set_up(options, config)
    if options.metric is not None or options.reporter is not None:
        search_current_folder()
    metric = None if options.metric is None else load_function("--metric", options.metric)
    reporter = None if options.reporter is None else load_function("--reporter", options.reporter)
    with ExitStack() as stack:
        reporters: list[Reporter] = [stack.enter_context(Terminal())]
        events = find_path(options.run) / "tensorboard"
        if options.tensorboard or events.is_dir():  # of a run that has written some
            reporters.append(stack.enter_context(TensorBoard(events)))
        reporters += [guarded(reporter)] if reporter else []
        trainer.train(
            config,
            options.run,
            new=options.new,
            init_from=options.init_from,
            init_parts=options.init_parts,
            new_vocabulary=options.new_vocabulary,
            card=loaded,
            profile=options.profile,
            metric=metric,
            reporters=reporters,
        )


def _load_card(options: Train, arguments: ConfigArguments) -> card.Card | None:
    """Returns the card of `--from-card`. UserError: it does not go with the other options."""
    if options.from_card is None:
        if options.any_versions:
            raise UserError("--any-versions: needs --from-card")
        return None
    if arguments.path is not None:
        raise UserError("--from-card: holds the config; leave out --config")
    loaded = card.load(options.from_card)
    if not options.any_versions:
        loaded.require_versions()
    return loaded


def _config(options: Train, arguments: ConfigArguments, loaded: card.Card | None) -> Config:
    """Returns the config of the file, or else of the card, of the run to continue or to start from.

    UserError: there is none.
    """
    if arguments.path is not None:
        return arguments.resolve()
    if loaded is not None:
        return arguments.resolve(loaded.config, f"card {loaded.name}: ")
    if folder := options.run if runs.exists(options.run) else options.init_from:
        return arguments.resolve(runs.load_config(folder))
    raise UserError(
        f"--config: name a config file, or a config such as quickstart ({options.run} holds no run)"
    )
