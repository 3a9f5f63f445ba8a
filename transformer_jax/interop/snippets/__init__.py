"""Programs that exported folders hold: each translates with nothing of this project."""

import shutil
from pathlib import Path

from transformer_jax.text.tokenizer import Tokenizers


def add_snippet(format: str, tokenizers: Tokenizers, folder: Path) -> None:
    """Writes translate.py, and the tokenizers that it reads, to the folder of an exported model."""
    shutil.copyfile(Path(__file__).with_name(f"{format}.py"), folder / "translate.py")
    for name, tokenizer in zip(("source.model", "target.model"), tokenizers, strict=True):
        (folder / name).write_bytes(tokenizer.model)
