"""The formats that `export` writes. To add one, write its module and list it in `FORMATS`."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.interop import ctranslate2, huggingface_export, int8, stablehlo
from transformer_jax.runs.run import Run
from transformer_jax.types import Params


class Format(NamedTuple):
    """A format of trained models."""

    export: Callable[[Run, int, Params, Path], None]
    """Writes the parameters of a step of a run to a folder, which must not exist. UserError: the
    format cannot express the model, or needs what is not installed."""
    check: Callable[[ModelConfig], None] = lambda config: None
    """Raises UserError, beginning with field and value, if it cannot express the model."""


FORMATS = {
    "int8": Format(int8.export),
    "stablehlo": Format(stablehlo.export),
    "ctranslate2": Format(ctranslate2.export, ctranslate2.check),
    "huggingface": Format(huggingface_export.export, huggingface_export.check),
}
"""The formats by their names on the command line, where `Export.format` lists them, too."""


def describe_formats(config: ModelConfig) -> str:
    """Returns the formats that can express a model, and the fields that keep it from the others."""
    names, others = [], []
    for name, format in FORMATS.items():
        try:
            format.check(config)
            names.append(name)
        except UserError as error:
            others.append(f"{name}: no ({str(error).partition(': ')[0]})")
    return "; ".join([", ".join(names), *others])
