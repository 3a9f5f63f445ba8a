"""The command `export`."""

from __future__ import annotations

import secrets
import shutil

from transformer_jax.cli.commands import Export
from transformer_jax.cli.common import register_kinds
from transformer_jax.errors import UserError
from transformer_jax.files import local_path
from transformer_jax.interop import ctranslate2, stablehlo
from transformer_jax.models.make import abstract_params
from transformer_jax.runs import run as runs


def run(options: Export) -> None:
    """Writes the model to a folder, whole or not at all."""
    folder = local_path(options.out, "--out")
    if folder.exists():
        raise UserError(f"--out={folder}: exists already; name a new folder")
    loaded = runs.load(options.run)
    register_kinds(options.kind, loaded.config)
    model, tokenizers = loaded.config.model, loaded.tokenizers
    sizes = tokenizers.source.size, tokenizers.target.size
    params = loaded.params(options.step, abstract_params(model, *sizes))
    unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    try:
        if options.format == "ctranslate2":
            ctranslate2.export(model, tokenizers, params, unfinished)
        else:
            stablehlo.export(model, loaded.config.decode, sizes, params, unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{folder}: {options.format} of {loaded.folder}")
