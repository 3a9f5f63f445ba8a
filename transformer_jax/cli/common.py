"""What several commands do: load the user's functions, cache programs, make a translator."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from transformer_jax.attention import register_kind
from transformer_jax.cli.commands import SearchOptions
from transformer_jax.config import Config
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.parallel.compile import cache_programs
from transformer_jax.runs import run
from transformer_jax.user_code import load_function, search_current_folder


def set_up(kinds: Sequence[str], config: Config) -> None:
    """Registers the kinds of attention of `--kind`, and caches compiled programs.

    Modules of kinds and of the config's kernel are also found in the current folder.
    """
    search_current_folder([*kinds, config.execution.kernel])
    for kind in kinds:
        _register(kind, config)
    cache_programs()


def _register(kind: str, config: Config) -> None:
    label, equals, name = kind.partition("=")
    if not (label and equals):
        raise UserError(f"--kind {kind}: must be LABEL=MODULE:FUNCTION")
    model = config.model
    attentions = (model.encoder_attention, model.decoder_attention, model.cross_attention)
    if label not in (attention.kind for attention in attentions):
        raise UserError(
            f"--kind {kind}: no attention of the config is of this kind; one is with "
            f"--config.model.cross-attention.kind={label}"
        )
    register_kind(label, load_function("--kind", name))


def load_translator(options: SearchOptions) -> Translator:
    """Returns the translator of a run, with the search that the options change."""
    loaded = run.load(options.run)
    set_up(options.kind, loaded.config)
    changes = {"beam": options.beam, "penalty": options.penalty, "alpha": options.alpha}
    changes = {name: value for name, value in changes.items() if value is not None}
    decode = dataclasses.replace(loaded.config.decode, **changes)
    return Translator.of_run(loaded, step=options.step, decode=decode)
