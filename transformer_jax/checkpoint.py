"""Checkpoints: Orbax writes the arrays; a manifest of digests, written last, makes them whole.

    checkpoints/00001000/weights/       the parameters to evaluate and to translate with
                         training/      what else is needed to go on
                         progress.json  what the training loop remembers beside arrays
                         manifest.json  format, step, best or not; name, size, sha256 of each file

A checkpoint is built under another name and renamed when its manifest is written, and renamed away
before it is deleted: what `steps` lists is whole, at whatever moment the process was killed.
Loading checks the digests first and executes nothing.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import type_handlers

from transformer_jax.types import Params

FORMAT = 1

_MANIFEST = "manifest.json"
_PROGRESS = "progress.json"
_NAME = re.compile("[0-9]{8}|[1-9][0-9]{8,}")
_UNFINISHED = re.compile(r"[0-9]{8,}\.(new|old).*")


def _mute_orbax() -> None:
    """Mutes what Orbax prints beside the error it raises: with one failed write, the tracebacks of
    every step of it, and of each other write that ends, or never begins, when nobody listens any
    more. Which of these there are depends on the order in which the writes fail."""
    report = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)  # of a coroutine
        theirs = code is not None and "orbax" in Path(code.co_filename).parts
        if not theirs and str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    sys.unraisablehook = hook
    never = r"coroutine '\S*(serializ|_create_paths|write_fragment)\S*' was never awaited"
    warnings.filterwarnings("ignore", never, RuntimeWarning)
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    echo = re.compile("OCDBT|orbax|async_serialize")
    logging.getLogger("asyncio").addFilter(lambda record: not echo.search(record.getMessage()))


_mute_orbax()


class Checkpoints:
    """Writes the checkpoints of one run, in the background. A context manager.

    `folder` is made if missing, and rid of what a killed process left unfinished. The newest `keep`
    checkpoints are kept, and the best one. With several processes, all make the same calls.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder.absolute()
        self._keep = keep
        handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
        handlers.add(None, ocp.args.PyTreeSave, _handler())
        # Else a thread can wait for a folder after the write has failed, and the process with it.
        here = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        self._orbax = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                composite_options=ocp.CompositeOptions(async_options=here),
                handler_registry=handlers,
            ),
            async_options=here,
        )
        self._background = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self._attempts = 0
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_unfinished()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(
        self, step: int, trees: dict[str, Any], progress: dict[str, Any], *, best: bool = False
    ) -> None:
        """Saves named trees of arrays, and `progress` (JSON values).

        Returns once the memory of the arrays may be donated; the rest happens in the background.
        `best`: no checkpoint before this one was better. OSError: no space left, or the save before
        this one failed.
        """
        self.wait()
        _require_space(self._folder, trees)
        text = json.dumps(progress)
        # A write that failed may go on for a while: no other gets its name.
        self._attempts += 1
        new = self._folder / f"{step:08d}.new{self._attempts}"
        arguments = {name: ocp.args.PyTreeSave(tree) for name, tree in trees.items()}
        self._orbax.save(new, args=ocp.args.Composite(**arguments))
        self._pending = self._background.submit(self._finish, step, new, text, best)

    def wait(self) -> None:
        """Returns when nothing is being written. OSError: the last save failed."""
        error = None if self._pending is None else self._pending.exception()
        self._pending = None
        multihost_utils.sync_global_devices("checkpoint")
        self._remove_unfinished()
        if error is not None:
            raise error

    def close(self) -> None:
        """Waits, and ends the background work. OSError: the last save failed."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._orbax.close()

    def _finish(self, step: int, new: Path, progress: str, best: bool) -> None:
        try:
            self._orbax.wait_until_finished()
            if jax.process_index() == 0:
                _write_synced(new / _PROGRESS, progress)
                _write_manifest(new, step, best)
                self._publish(step, new)
        except Exception as error:
            where = _where(self._folder, step)
            raise OSError(f"saving {where}: {_reason(error)}") from error

    def _publish(self, step: int, new: Path) -> None:
        final = _path(self._folder, step)
        if final.exists():
            _remove(final)
        new.rename(final)
        known = steps(self._folder)
        best = next((n for n in reversed(known) if _is_best(self._folder, n)), None)
        kept = {*known[-self._keep :], step, best}
        for old in set(known) - kept:
            _remove(_path(self._folder, old))

    def _remove_unfinished(self) -> None:
        for path in self._folder.glob("*"):
            if _UNFINISHED.fullmatch(path.name) and jax.process_index() == 0:
                shutil.rmtree(path, ignore_errors=True)


def steps(folder: Path) -> list[int]:
    """The steps of the whole checkpoints, ascending; none where there is no folder."""
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if (path / _MANIFEST).is_file()]
    return sorted(int(name) for name in names if _NAME.fullmatch(name))


def best_step(folder: Path) -> int | None:
    """The last step that was saved as the best. ValueError: a damaged manifest, by name."""
    newest_first = reversed(steps(folder))
    return next((step for step in newest_first if _read_manifest(folder, step).best), None)


def restore(folder: Path, step: int, tree: str, like: Any = None) -> Any:
    """A tree as it was saved, bit for bit, in the structure of `like`.

    Leaves of `like` are arrays or `jax.ShapeDtypeStruct`; where they have a sharding, it becomes
    that of what is restored, and the others become NumPy arrays. None: nested dictionaries and
    lists of NumPy arrays. ValueError, saying which: no such step or tree, a newer format, a damaged
    file, or other names, shapes or types than those of `like`.
    """
    path = _verified(folder, step, tree)
    with ocp.Checkpointer(_handler()) as orbax:
        stored = orbax.metadata(path).item_metadata.tree
        like = stored if like is None else like
        wanted = _named(like)
        _require_same(f"{_where(folder, step)}: {tree}", _named(stored), wanted)
        arguments = jax.tree.unflatten(
            jax.tree.structure(stored), [_restore_args(wanted[name]) for name in _named(stored)]
        )
        values = orbax.restore(path, args=ocp.args.PyTreeRestore(restore_args=arguments))
    values = _named(values)
    return jax.tree.unflatten(jax.tree.structure(like), [values[name] for name in wanted])


def progress(folder: Path, step: int) -> dict[str, Any]:
    """The `progress` that was saved. ValueError: as `restore`."""
    return json.loads(_verified(folder, step, _PROGRESS).read_bytes())


def average(folder: Path, steps: Sequence[int]) -> Params:
    """The mean of the weights of several checkpoints, summed in float64, as float32.

    Two trees are in memory at most. ValueError: no steps, or as `restore`.
    """
    if not steps:
        raise ValueError(f"{folder}: no checkpoints to average")
    first, *others = steps
    total = jax.tree.map(lambda x: x.astype(np.float64), restore(folder, first, "weights"))
    for step in others:
        jax.tree.map(lambda a, b: np.add(a, b, out=a), total, restore(folder, step, "weights"))
    return jax.tree.map(lambda x: np.asarray(x / len(steps), np.float32), total)


class _File(NamedTuple):
    size: int
    sha256: str


class _Manifest(NamedTuple):
    best: bool
    files: dict[str, _File]


def _path(folder: Path, step: int) -> Path:
    return folder / f"{step:08d}"


def _where(folder: Path, step: int) -> str:
    return f"checkpoint {step} in {folder}"


def _write_manifest(new: Path, step: int, best: bool) -> None:
    for note in new.rglob("commit_success.txt"):
        note.unlink()  # of Orbax, with the path where it was written: a copied run is right, too
    files = []
    for name, path in sorted(_files(new).items()):
        with path.open("r+b") as file:
            os.fsync(file.fileno())
        files.append({"name": name, **_measure(path)._asdict()})
    manifest = {"format": FORMAT, "step": step, "best": best, "files": files}
    _write_synced(new / _MANIFEST, json.dumps(manifest, indent=1))


def _read_manifest(folder: Path, step: int) -> _Manifest:
    path, where = _path(folder, step), _where(folder, step)
    if not path.is_dir():
        known = ", ".join(map(str, steps(folder))) or "none"
        raise ValueError(f"{where}: does not exist; there are: {known}")
    if not (path / _MANIFEST).is_file():
        raise ValueError(f"{where}: half-written, without {_MANIFEST}")
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
    except ValueError:
        manifest = None
    match manifest:
        case {"format": int(version)} if version > FORMAT:
            raise ValueError(
                f"{where}: format {version} is of a newer version; this one reads up to {FORMAT}"
            )
        case {"format": 1, "step": int(saved), "best": bool(best), "files": [*files], **rest} if (
            saved == step and not rest
        ):
            return _Manifest(best, dict(_read_entry(where, entry) for entry in files))
    raise ValueError(f"{where}: {_MANIFEST} is damaged")


def _is_best(folder: Path, step: int) -> bool:
    """Whether it was saved as the best; a damaged manifest, which loading reports, says nothing."""
    try:
        return _read_manifest(folder, step).best
    except ValueError:
        return False


def _read_entry(where: str, entry: Any) -> tuple[str, _File]:
    match entry:
        case {"name": str(name), "size": int(size), "sha256": str(digest), **rest} if not rest:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"{where}: {_MANIFEST} names {name!r}, outside the checkpoint")
            return name, _File(size, digest)
    raise ValueError(f"{where}: {_MANIFEST} is damaged")


def _verified(folder: Path, step: int, part: str) -> Path:
    """The path of a tree or file, once it and the files beside it are known to be as saved."""
    path, where = _path(folder, step), _where(folder, step)
    listed, found = _read_manifest(folder, step).files, _files(path)
    parts = {name.split("/")[0] for name in listed}
    if part not in parts:
        raise ValueError(f"{where}: has no {part!r}; it has: {', '.join(sorted(parts))}")
    for name in sorted({*listed, *found}):
        if "/" in name and not name.startswith(f"{part}/"):
            continue
        if name not in found:
            raise ValueError(f"{where}: {name} is missing")
        if name not in listed:
            raise ValueError(f"{where}: {name} is not in {_MANIFEST}")
        if _measure(found[name]) != listed[name]:
            raise ValueError(f"{where}: {name} is damaged: not what was saved")
    return (path / part).absolute()


def _files(checkpoint: Path) -> dict[str, Path]:
    """All files but the manifest, by their names in it."""
    paths = {p.relative_to(checkpoint).as_posix(): p for p in checkpoint.rglob("*") if p.is_file()}
    return {name: path for name, path in paths.items() if name != _MANIFEST}


def _measure(path: Path) -> _File:
    with path.open("rb") as file:
        return _File(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _remove(checkpoint: Path) -> None:
    """Deletes a checkpoint; where that is cut short, what is left does not look like one."""
    shutil.rmtree(checkpoint.rename(checkpoint.with_suffix(".old")))


def _handler() -> ocp.PyTreeCheckpointHandler:
    """For trees of arrays; Orbax's files on shardings and chunks, which nobody reads, left out."""
    registry = type_handlers.create_type_handler_registry(
        (jax.Array, type_handlers.ArrayHandler(enable_write_sharding_file=False)),
        (np.ndarray, type_handlers.NumpyHandler()),
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by name, "encoder/layer_0/kernel": the same for a tree and as Orbax stores it."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding)


def _require_same(where: str, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    def describe(leaves: dict[str, Any], name: str) -> str:
        return f"{leaves[name].dtype}{list(leaves[name].shape)}" if name in leaves else "nothing"

    wrong = [
        f"{name}: {describe(stored, name)} saved, {describe(wanted, name)} wanted"
        for name in sorted({*stored, *wanted})
        if describe(stored, name) != describe(wanted, name)
    ]
    if wrong:
        raise ValueError(f"{where} does not fit: {'; '.join(wrong)}")


def _require_space(folder: Path, trees: dict[str, Any]) -> None:
    """OSError before anything is written, rather than many when the disk is full."""
    need = sum(leaf.nbytes for leaf in jax.tree.leaves(trees))
    free = shutil.disk_usage(folder).free
    if need > free:
        raise OSError(f"no space left in {folder}: {need:,} bytes needed, {free:,} free")


def _reason(error: Exception) -> str:
    """One line on why a file was not written."""
    code = re.search(r"os_error_code='([0-9]+)'", str(error))  # TensorStore raises no OSError
    if code:
        return os.strerror(int(code[1]))
    return getattr(error, "strerror", None) or str(error).partition("\n")[0]
