"""The run folder, which stands alone: config, tokenizer and checkpoints. Reading one runs no code.

config.json      format, config, what it was made with and from which data
*.model          the SentencePiece models
metrics.jsonl    a line for each record of training
checkpoints/     see checkpoint.py
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformer_jax import checkpoint, tokenizer
from transformer_jax.config import Config, from_json, to_json
from transformer_jax.tokenizer import Tokenizers
from transformer_jax.types import Params

FORMAT = 1

_PACKAGES = (
    "transformer-jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "sentencepiece",
)


@dataclass(frozen=True)
class Run:
    """A run on disk."""

    folder: Path
    config: Config
    tokenizers: Tokenizers
    made_from: dict[str, Any]  # versions, digests of the data

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.folder / "checkpoints"

    def best_step(self) -> int:
        """The best checkpoint's step, or the last one's. ValueError: there is none."""
        steps = checkpoint.steps(self.checkpoints)
        if not steps:
            raise ValueError(f"run {self.folder}: has no whole checkpoint yet; train it further")
        best = checkpoint.best_step(self.checkpoints)
        return steps[-1] if best is None else best

    def weights(self, step: int | None = None, like: Any = None) -> Params:
        """The parameters to translate with, of checkpoint `step` or the best one.

        ValueError: they are not the tree of arrays `like`; every mismatch is named.
        """
        step = self.best_step() if step is None else step
        return checkpoint.restore(self.checkpoints, step, "weights", like)


def create(
    folder: Path,
    config: Config,
    tokenizers: Tokenizers,
    made_from: dict[str, Any],
    save: Callable[[Path], None] = lambda _: None,
) -> Run:
    """Makes the run folder, which must be missing or empty, all at once.

    `save` is given the folder of checkpoints to be, in which it may write some.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"run {folder}: is not empty; name a new folder")
    whole = folder.resolve()
    temporary = whole.with_name(f".{whole.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        tokenizer.save(tokenizers, temporary)
        save(temporary / "checkpoints")
        stored = {
            "format": FORMAT,
            "config": to_json(config),
            "tokenizers": [side.digest for side in tokenizers],
            "made_from": made_from,
        }
        _write(temporary / "config.json", stored)
        _move(temporary, whole)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Run(folder, config, tokenizers, made_from)


def update(old: Run, config: Config) -> Run:
    """The run with fields changed that are not compared, such as those of the search; stored."""
    path = old.folder / "config.json"
    stored = json.loads(path.read_text(encoding="utf-8")) | {"config": to_json(config)}
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        _write(temporary, stored)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return dataclasses.replace(old, config=config)


def exists(folder: Path) -> bool:
    """Whether `folder` holds a run. ValueError: it holds something else."""
    if (folder / "config.json").is_file():
        return True
    if folder.is_file():
        raise ValueError(f"run {folder}: is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"run {folder}: holds files but no config.json, so it is not a run")
    return False


def load(folder: Path) -> Run:
    """Reads a run. ValueError: missing, not a run, damaged, or of a newer format."""
    if not folder.is_dir():
        raise ValueError(f"run {folder}: no such folder")
    if not exists(folder):
        raise ValueError(f"run {folder}: is empty")
    path = folder / "config.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is damaged: {error}") from error
    if not isinstance(stored, dict) or "config" not in stored:
        raise ValueError(f"{path}: is not a run's config")
    if stored.get("format") != FORMAT:
        raise ValueError(f"{path}: format={stored.get('format')!r}: this version reads {FORMAT}")
    try:
        config = from_json(stored["config"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if ":" in config.execution.kernel:  # code is named on the command line, never by a file
        execution = dataclasses.replace(config.execution, kernel="auto")
        config = dataclasses.replace(config, execution=execution)
    match stored.get("tokenizers"):
        case [str(), str()] as digests:
            tokenizers = tokenizer.load(folder, digests)
            return Run(folder, config, tokenizers, stored.get("made_from", {}))
        case other:
            raise ValueError(f"{path}: tokenizers={other!r}: must be two digests")


def _write(path: Path, stored: dict[str, Any]) -> None:
    text = json.dumps(stored, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _move(made: Path, folder: Path) -> None:
    """Renames; but an empty folder stays the one it is, since it may be somebody's current one."""
    if not folder.exists():
        made.replace(folder)
        return
    for path in sorted(made.iterdir(), key=lambda path: path.name == "config.json"):
        path.replace(folder / path.name)  # config.json last: it makes the folder a run


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    return {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES}
