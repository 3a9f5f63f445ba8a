"""The run folder, which stands alone: config, tokenizer and checkpoints. Loading executes no code.

A folder holds

    config.json      format, config, and provenance: versions of the software, the devices, and
                     digests of the data; the SHA-256 of all this
    *.model          the SentencePiece models
    metrics.jsonl    one line for each record of training
    checkpoints/     see checkpoint.py
"""

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from etils import epath

from transformer_jax import files
from transformer_jax.config import DATA_PARALLEL, Config, from_json, to_json
from transformer_jax.errors import UserError, about
from transformer_jax.files import AnyPath
from transformer_jax.runs import checkpoint, lock
from transformer_jax.text import tokenizer
from transformer_jax.types import Params
from transformer_jax.user_code import is_function_name

FORMAT = 2
_FIELDS = ("sha256", "format", "config", "tokenizers", "provenance")
"""The fields of config.json."""

_UNFINISHED = ".unfinished"
"""File that marks a run while it is created. Until config.json is written, last, the folder holds
no run, and another process may create it anew."""

_PACKAGES = "transformer-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "sentencepiece"


@dataclass(frozen=True)
class Run:
    """A run on a disk or in object storage."""

    folder: AnyPath
    config: Config
    tokenizers: tokenizer.Tokenizers
    provenance: dict[str, Any]  # versions of software and order, devices, digests of the data

    @property
    def checkpoints(self) -> AnyPath:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    def best_step(self) -> int:
        """Returns the step of the best checkpoint, or else of the last.

        UserError: none exists, or one has lost its manifest.
        """
        checkpoint.require_manifests(self.checkpoints)
        steps = checkpoint.steps(self.checkpoints)
        if not steps:
            raise UserError(f"run {self.folder}: has no whole checkpoint yet; train it further")
        best = checkpoint.best_step(self.checkpoints)
        return steps[-1] if best is None else best

    def require_float32(self) -> None:
        """UserError: the matrices are int8, to translate with only."""
        if self.config.model.weights != "float32":
            raise UserError(
                f"run {self.folder}: model.weights={self.config.model.weights!r}: only translates "
                "and scores; use the run that it was exported from"
            )

    def newest_steps(self) -> list[int]:
        """Returns the steps of the newest checkpoints, ascending, without an older best one.

        UserError: one has lost its manifest.
        """
        checkpoint.require_manifests(self.checkpoints)
        return checkpoint.steps(self.checkpoints)[-self.config.train.keep :]

    def params(self, step: int | None = None, like: Any = None) -> Params:
        """Returns the parameters of checkpoint `step`, or of the best one.

        UserError: they differ from the tree of arrays `like`; the first differences are named.
        """
        step = self.best_step() if step is None else step
        return checkpoint.restore(self.checkpoints, step, "weights", like)


def create(run: Run, save: Callable[[AnyPath], None] = lambda _: None) -> Run:
    """Creates a run whole or not at all, in its folder, which must be missing or empty.

    `save` is called with the future folder of checkpoints and may write some there.
    """
    folder = run.folder
    if not _is_free(folder):
        raise UserError(f"run {folder}: is not empty; name a new folder")
    with _unfinished(folder), files.named(folder):
        tokenizer.save(run.tokenizers, folder)
        save(run.checkpoints)
        digests = [side.digest for side in run.tokenizers]
        stored = {"format": FORMAT, "config": to_json(run.config), "tokenizers": digests}
        stored["provenance"] = run.provenance
        _write(folder / "config.json", stored)  # last: it makes the folder a run
    return run


def update(old: Run, config: Config) -> None:
    """Stores a config that differs in fields that are not compared, such as those of the search.

    Deletes temporary files that killed processes have left.
    """
    if isinstance(old.folder, Path):
        for remains in (*old.folder.glob(".*.tmp"), old.folder / _UNFINISHED):
            remains.unlink(missing_ok=True)
    path = old.folder / "config.json"
    _write(path, _read(path) | {"config": to_json(config)})


def average(source: Run, steps: Sequence[int], folder: epath.PathLike) -> Run:
    """Creates a run in `folder` whose parameters are the mean of those of several checkpoints.

    UserError: their matrices are int8.
    """
    source.require_float32()
    params = checkpoint.average(source.checkpoints, steps)
    provenance = {"average_of": {"run": source.folder.name, "steps": list(steps)}}
    made = replace(source, folder=files.find_path(folder), provenance=provenance)
    return create_with(params, max(steps), made)


def create_with(params: Params, step: int, run: Run) -> Run:
    """Creates a run that has these parameters as its only checkpoint."""

    def save(checkpoints: AnyPath) -> None:
        with checkpoint.Checkpoints(checkpoints, keep=1) as writer:
            writer.save(step, {"weights": params}, {}, best=True)

    return create(run, save)


def exists(folder: epath.PathLike) -> bool:
    """Returns whether `folder` holds a run. UserError: it holds something else."""
    folder = files.find_path(folder)
    if (folder / "config.json").is_file():
        return True
    if folder.is_file():
        raise UserError(f"run {folder}: is a file; name a folder")
    if not _is_free(folder):
        raise UserError(f"run {folder}: holds files but no config.json, so it is not a run")
    return False


def load(folder: epath.PathLike) -> Run:
    """Loads a run to use its model.

    Its config is independent of the machine where the run was trained: the mesh and the folder of
    cached corpora (`data.cache`) are the default ones, and a kernel stored as MODULE:FUNCTION is
    replaced by "auto", since code is never named by a file.

    UserError: the run is missing, damaged or of another format.
    """
    folder = files.find_path(folder)
    stored, config = _stored(folder)
    kernel = "auto" if is_function_name(config.execution.kernel) else config.execution.kernel
    config = config.changed(data={"cache": ""}, execution={"kernel": kernel})
    config = replace(config, mesh=DATA_PARALLEL)
    tokenizers = tokenizer.load(folder, stored["tokenizers"])
    return Run(folder, config, tokenizers, stored.get("provenance", {}))


def load_config(folder: epath.PathLike) -> Config:
    """Returns the config of a run as it is stored, to continue training. UserError: as `load`."""
    return _stored(files.find_path(folder))[1]


def _is_free(folder: AnyPath) -> bool:
    """Returns whether a folder is missing, empty, or what a killed process has not finished."""
    # An object "NAME/", which Google's console makes of an empty folder, is no file.
    bucket = isinstance(folder, epath.Path)
    names = {*files.files_below(folder)} if bucket else {path.name for path in folder.glob("*")}
    return names <= {lock.NAME} or (_UNFINISHED in names and "config.json" not in names)


def _stored(folder: AnyPath) -> tuple[dict[str, Any], Config]:
    """Returns the contents of the run's config.json, and the config in it. UserError: as `load`."""
    if not exists(folder):
        raise UserError(f"run {folder}: {'is empty' if folder.is_dir() else 'no such folder'}")
    return read_config(folder / "config.json")


def read_config(path: AnyPath) -> tuple[dict[str, Any], Config]:
    """Returns the contents of a run's config.json, and the config in it. UserError: as `load`."""
    stored = _read(path)
    if not isinstance(stored, dict) or "config" not in stored:
        raise UserError(f"{path}: is not a run's config")
    if stored.get("format") != FORMAT:
        raise UserError(f"{path}: format={stored.get('format')!r}: this version reads {FORMAT}")
    with about(path):
        config = from_json(stored["config"])
    match stored.get("tokenizers"):
        case [str(), str()]:
            pass
        case other:
            raise UserError(f"{path}: tokenizers={other!r}: must be two digests")
    if unknown := {*stored} - {*_FIELDS}:
        fields = ", ".join(_FIELDS)
        raise UserError(f"{path}: {min(unknown)!r}: unknown field; must be one of: {fields}")
    digest = _digest(stored)
    if stored.get("sha256", digest) != digest:  # deleted by a user who has edited the file
        raise UserError(
            f'{path}: is damaged or was edited: its SHA-256 is {digest[:12]}…, not "sha256" in it; '
            'restore it or, if the edit is yours, delete the line "sha256"'
        )
    return stored, config


def _digest(stored: dict[str, Any]) -> str:
    return files.json_digest({name: value for name, value in stored.items() if name != "sha256"})


def _read(path: AnyPath) -> Any:
    content = path.read_bytes()
    with about(f"{path}: is damaged"):
        return files.parse_json(content)


def _write(path: AnyPath, stored: dict[str, Any]) -> None:
    # First, since a user may delete the line: the last one has no comma after it.
    stored = {"sha256": ""} | stored | {"sha256": _digest(stored)}
    files.write_whole(path, json.dumps(stored, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def _unfinished(folder: AnyPath) -> Iterator[None]:
    """Marks a folder while a run is written to it; after an error, nothing of it remains."""
    on_disk = isinstance(folder, Path)
    missing = on_disk and not folder.exists()
    if on_disk:
        folder.mkdir(parents=True, exist_ok=True)
    marker = folder / _UNFINISHED
    marker.write_bytes(b"")
    try:
        _clear(folder)
        yield
    except BaseException:
        _clear(folder)
        marker.unlink()
        if missing:
            folder.rmdir()
        raise
    marker.unlink()


def _clear(folder: AnyPath) -> None:
    """Deletes what `create` writes before config.json."""
    tokenizer.remove(folder)
    if (folder / "checkpoints").exists():
        files.remove_folder(folder / "checkpoints")


def versions() -> dict[str, str]:
    """Returns the versions of the software that a result depends on."""
    return {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES}
