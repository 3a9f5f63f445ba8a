"""The command `import`, which makes a run of a model that was trained elsewhere."""

from pathlib import Path

from transformer_jax.cli.commands import Import
from transformer_jax.config import Config, describe
from transformer_jax.errors import UserError
from transformer_jax.files import find_path
from transformer_jax.interop import huggingface, marian
from transformer_jax.models.make import check_model, count_parameters
from transformer_jax.runs import run as runs


def run(options: Import) -> None:
    """Creates a run, whole or not at all."""
    if runs.exists(options.run):
        raise UserError(f"--run={options.run}: exists already; name a new folder")
    source = Path(options.source)
    if not source.exists():
        raise UserError(f"{source}: no such file or folder")
    if source.suffix == ".safetensors":
        raise UserError(f"{source}: name its folder, which also has the vocabularies")
    read = huggingface.load if (source / "config.json").is_file() else marian.load
    imported = read(source)
    sizes = imported.tokenizers.sizes
    # To continue with, if no other config is named. Label smoothing would first undo what a model
    # has learned without it.
    schedule = {"schedule": "inverse_sqrt", "learning_rate": 2e-4, "warmup": 100}
    config = Config(model=imported.model, decode=imported.decode).changed(
        tokenizer={"joint": imported.model.tied == "all", "vocabulary": max(*sizes, 261)},
        data={"train": (), "dev": ()},
        optimizer=schedule | {"clip_norm": 1.0, "label_smoothing": 0.0},
        train={"steps": 1000, "evaluate_every": 100, "save_every": 100},
    )
    check_model(config.model)
    provenance = {"imported_from": {"path": source.resolve().name, "sha256": imported.digests}}
    made = runs.Run(find_path(options.run), config, imported.tokenizers, provenance)
    runs.create_with(imported.params, 0, made)
    millions = count_parameters(config.model, *sizes) / 1e6
    about = f"{millions:.1f} M parameters, {sizes[0]:,} source ids, {sizes[1]:,} target ids"
    print("\n".join([f"{options.run}: {about}", *describe(config)]))
