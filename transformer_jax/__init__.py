"""The encoder-decoder Transformer of "Attention Is All You Need" in JAX and Flax.

from transformer_jax import Translator, load_config_file, train

run = train(load_config_file("configs/quickstart.py"), "runs/quickstart")
Translator.load("runs/quickstart")(["The old teacher buys a new book."])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer_jax.config import Config, load_config_file
    from transformer_jax.loop import train
    from transformer_jax.translate import Translator

__all__ = ["Config", "Translator", "load_config_file", "train"]

_HOMES = {"Config": "config", "load_config_file": "config", "train": "loop"}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that `--help` does not wait for JAX."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = _HOMES.get(name, "translate")
    return getattr(import_module(f"{__name__}.{home}"), name)
