"""What several commands do: load the user's functions, cache programs, make a translator."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from transformer_jax.attention import register_kind
from transformer_jax.cli.commands import ProcessOptions, SearchOptions
from transformer_jax.config import Config, MeshConfig, did_you_mean
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.parallel.processes import broadcast, join, require_same_everywhere
from transformer_jax.parallel.program_cache import cache_programs
from transformer_jax.runs import run
from transformer_jax.user_code import load_function, search_current_folder


def set_up(kinds: Sequence[str], config: Config) -> None:
    """Registers the kinds of attention of `--kind`, and caches compiled programs."""
    register_kinds(kinds, config)
    cache_programs()


def register_kinds(kinds: Sequence[str], config: Config) -> None:
    """Registers the kinds of attention of `--kind`.

    Modules of kinds and of the config's kernel are also found in the current folder.
    """
    search_current_folder([*kinds, config.execution.kernel])
    for kind in kinds:
        _register(kind, config)


def join_processes(options: ProcessOptions) -> None:
    """Joins the other processes, if the options name a coordinator.

    UserError: options are missing or contradict each other, or the others do not answer.
    """
    address, process = options.coordinator, options.process
    if address in (None, "auto"):
        if process is not None:
            raise UserError(f"--process={process}: needs --coordinator=HOST:PORT")
        if address is not None:
            join(address, None, None)
        return
    if not re.fullmatch(r".+:\d+", address):
        raise UserError(f"--coordinator={address}: must be HOST:PORT or auto")
    if process is None:
        raise UserError(f"--coordinator={address}: needs --process=I/N, too")
    found = re.fullmatch(r"(\d+)/(\d+)", process)
    if not found or int(found[1]) >= int(found[2]):
        raise UserError(f"--process={process}: must be I/N with I from 0 to N - 1, such as 0/2")
    join(address, int(found[2]), int(found[1]))


def make_mesh_config(axes: Sequence[str]) -> MeshConfig:
    """Returns the mesh of `--mesh AXIS=N ...`. UserError: an axis is unknown, or N no number."""
    known = [field.name for field in dataclasses.fields(MeshConfig)]
    sizes: dict[str, int] = {}
    for text in axes:
        axis, _, size = text.partition("=")
        if axis not in known:
            raise UserError(f"--mesh {text}: unknown axis{did_you_mean(axis, known)}")
        if not re.fullmatch(r"-?\d+", size):
            raise UserError(f"--mesh {text}: must be AXIS=N, such as fsdp=4")
        sizes[axis] = int(size)
    return MeshConfig(**sizes)


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
    """Returns the translator of a run, with the search that the options change.

    First joins the other processes, if the options name a coordinator.
    """
    join_processes(options)
    loaded = run.load(options.run)
    set_up(options.kind, loaded.config)
    changes = {"beam": options.beam, "penalty": options.penalty, "alpha": options.alpha}
    changes = {name: value for name, value in changes.items() if value is not None}
    decode = dataclasses.replace(loaded.config.decode, **changes)
    config = dataclasses.replace(loaded.config, decode=decode, mesh=make_mesh_config(options.mesh))
    require_same_everywhere(config, {})
    # All take the coordinator's choice, since training may save a better checkpoint meanwhile.
    step = broadcast(loaded.best_step() if options.step is None else options.step)
    return Translator.of_run(dataclasses.replace(loaded, config=config), step=step)
