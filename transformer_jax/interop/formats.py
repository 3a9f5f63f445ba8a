"""The formats that `export` writes. To add one, write its module and list it in `FORMATS`."""

from pathlib import Path
from typing import Protocol

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.interop import ctranslate2, huggingface_export, int8, stablehlo
from transformer_jax.runs.run import Run
from transformer_jax.types import Params


class Format(Protocol):
    """A module that writes models in a format."""

    def check(self, config: ModelConfig) -> None:
        """Raises UserError, beginning with field and value, if it cannot express the model."""

    def export(self, run: Run, step: int, params: Params, folder: Path) -> None:
        """Writes the parameters `params`, those of step `step`, to `folder`, which must not exist.

        UserError: the format cannot express the model, or needs what is not installed.
        """


FORMATS: dict[str, Format] = {
    "int8": int8,
    "stablehlo": stablehlo,
    "ctranslate2": ctranslate2,
    "huggingface": huggingface_export,
}
"""The formats by their names on the command line, where `Export.format` lists them, too."""


def describe_formats(config: ModelConfig) -> str:
    """Returns the formats that can express a model, and the fields that keep it from the others."""
    names, others = [], []
    for name, module in FORMATS.items():
        try:
            module.check(config)
            names.append(name)
        except UserError as error:
            others.append(f"{name}: no ({str(error).partition(': ')[0]})")
    return "; ".join([", ".join(names), *others])
