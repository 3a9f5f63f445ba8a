"""The command `export`."""

from __future__ import annotations

import dataclasses
import secrets
import shutil
from pathlib import Path

from transformer_jax.cli.commands import Export
from transformer_jax.cli.common import load_user_code
from transformer_jax.errors import UserError
from transformer_jax.files import local_path
from transformer_jax.interop import ctranslate2, stablehlo
from transformer_jax.models.make import abstract_params
from transformer_jax.models.quantization import quantize
from transformer_jax.runs import run as runs
from transformer_jax.runs.run import Run
from transformer_jax.types import Params


def run(options: Export) -> None:
    """Writes the model to a folder, whole or not at all."""
    folder = local_path(options.out, "--out")
    if folder.exists():
        raise UserError(f"--out={folder}: exists already; name a new folder")
    loaded = runs.load(options.run)
    load_user_code(options, loaded.config)
    loaded.require_float32()
    model, tokenizers = loaded.config.model, loaded.tokenizers
    sizes = tokenizers.source.size, tokenizers.target.size
    step = loaded.best_step() if options.step is None else options.step
    params = loaded.params(step, abstract_params(model, *sizes))
    if options.format == "int8":
        _export_int8(loaded, params, step, folder)
    else:
        _export(options.format, loaded, params, folder)
    print(f"{folder}: {options.format} of {loaded.folder}")


def _export_int8(loaded: Run, params: Params, step: int, folder: Path) -> None:
    """Writes a run."""
    model = dataclasses.replace(loaded.config.model, weights="int8")
    config = dataclasses.replace(loaded.config, model=model)
    provenance = {"int8_of": {"run": loaded.folder.name, "step": step}}
    made = dataclasses.replace(loaded, config=config)
    runs.derive(made, quantize(params), step, folder, provenance)


def _export(name: str, loaded: Run, params: Params, folder: Path) -> None:
    model, tokenizers = loaded.config.model, loaded.tokenizers
    unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    try:
        if name == "ctranslate2":
            ctranslate2.export(model, tokenizers, params, unfinished)
        else:
            sizes = tokenizers.source.size, tokenizers.target.size
            stablehlo.export(model, loaded.config.decode, sizes, params, unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
