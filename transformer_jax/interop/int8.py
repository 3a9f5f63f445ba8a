"""Writes a trained model as a run whose matrices are 8-bit integers."""

from pathlib import Path

from transformer_jax.models.quantization import quantize
from transformer_jax.runs import run as runs
from transformer_jax.runs.run import Run
from transformer_jax.types import Params


def export(run: Run, step: int, params: Params, folder: Path) -> None:
    """Writes the run to `folder`, which must not exist."""
    config = run.config.changed(model={"weights": "int8"})
    provenance = {"int8_of": {"run": run.folder.name, "step": step}}
    runs.create_with(quantize(params), step, Run(folder, config, run.tokenizers, provenance))
