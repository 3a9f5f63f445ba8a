"""Programs that exported folders hold: each translates with nothing of this project."""

import shutil
from pathlib import Path

from transformer_jax.text.tokenizer import Tokenizers


def add_snippet(
    name: str, folder: Path, program: str, tokenizers: Tokenizers, suffix: str = ".model"
) -> None:
    """Writes the file `name` of this folder as `program`, and the tokenizers that it reads, to the
    folder of an exported model."""
    shutil.copyfile(Path(__file__).with_name(name), folder / program)
    for side, tokenizer in zip(("source", "target"), tokenizers, strict=True):
        (folder / f"{side}{suffix}").write_bytes(tokenizer.model)
