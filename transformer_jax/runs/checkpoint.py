"""Saves and restores checkpoints with Orbax; a manifest, written last, makes them whole.

    checkpoints/00001000/weights/       the parameters to evaluate and to translate with
                         training/      the rest of the training state, which only the best
                                        checkpoint and the newest two keep
                         progress.json  what the training loop stores besides arrays
                         manifest.json  format, step, best or not; name, size, sha256 of each file;
                                        sha256 of the manifest

A checkpoint counts once its manifest is written, which happens last, and until it is deleted, which
happens first. Therefore every checkpoint that `steps` lists is whole, even after the process was
killed, on a disk and in object storage. Loading verifies the digests first and executes
no code from the files.

On a disk a checkpoint is built as STEP.newN and renamed once it is whole. Object storage cannot
rename: there it is built under its final name, which is STEP.newN if STEP is saved again.
"""

import concurrent.futures
import contextlib
import functools
import json
import logging
import os
import re
import secrets
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import type_handlers

from transformer_jax import files
from transformer_jax.errors import UserError, about
from transformer_jax.files import AnyPath
from transformer_jax.parallel.processes import broadcast, is_coordinator, wait_for_all
from transformer_jax.runs import manifest
from transformer_jax.types import Params

logger = logging.getLogger(__name__)

_PROGRESS = "progress.json"
_STATE = "training"
_CONTINUED = 2  # newest checkpoints that keep it: one more than is needed, which may be damaged
_NAMED = 5  # arrays in a message
_NAME = re.compile(r"([0-9]{8}|[1-9][0-9]{8,})(?:\.new([0-9]+))?")
_LEFTOVER = re.compile(r"[0-9]{8,}(\.(new|old).*)?")  # of a checkpoint, unless it is whole
_NOT_FOR_ORBAX = re.compile(r"[*?\[\]\\\udc80-\udcff]")
"""Characters of globs, which Orbax takes for patterns, and bytes that are not UTF-8."""


def _mute_orbax() -> None:
    """Mutes what Orbax prints in addition to the error that it raises.

    After one failed write, Orbax prints a traceback for each stage of the write, and one for each
    other write that ends, or never starts, after the error was raised. Which of these appear
    depends on the order in which the writes fail.
    """
    report = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)  # of a coroutine
        from_orbax = code is not None and "orbax" in Path(code.co_filename).parts
        if not from_orbax and str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    sys.unraisablehook = hook
    never_awaited = r"coroutine '\S*(serializ|_create_paths|write_fragment)\S*' was never awaited"
    warnings.filterwarnings("ignore", never_awaited, RuntimeWarning)
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    from_orbax = re.compile("OCDBT|orbax|async_serialize")
    logging.getLogger("asyncio").addFilter(lambda r: not from_orbax.search(r.getMessage()))


_mute_orbax()


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """A context manager that writes the checkpoints of one run in the background.

    It makes `folder` if it is missing and removes unfinished checkpoints that a killed process has
    left there. It keeps the newest `keep` checkpoints and the best one; the newest two
    and the best one have a whole state, the others the weights. With several processes,
    all of them must make the same calls.
    """

    def __init__(self, folder: AnyPath, keep: int) -> None:
        self._folder = folder.absolute() if isinstance(folder, Path) else folder
        self._keep = keep
        handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
        handlers.add(None, ocp.args.PyTreeSave, _handler())
        # With asynchronous creation, a thread and the process can wait for a folder forever after
        # a write has failed.
        options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        inner = ocp.CompositeOptions(async_options=options)
        handler = ocp.CompositeCheckpointHandler(composite_options=inner, handler_registry=handlers)
        self._orbax = ocp.AsyncCheckpointer(handler, async_options=options)
        self._background = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self._used: set[str] = set()  # names of checkpoints
        if isinstance(self._folder, Path):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_unfinished()

    def __exit__(self, kind: object, *_: object) -> None:
        """Waits and releases the background threads. OSError: the last save has failed."""
        try:
            self.wait(together=kind is None)  # other processes may not know of an exception
        finally:
            self._background.shutdown()
            self._orbax.close()

    def save(
        self, step: int, trees: dict[str, Any], progress: dict[str, Any], *, best: bool = False
    ) -> None:
        """Saves named trees of arrays, and `progress` (JSON values).

        Returns as soon as the memory of the arrays may be donated and writes in the background.
        `best`: no earlier checkpoint had a better score. OSError: no space is left, or the previous
        save has failed.
        """
        self.wait()
        _require_space(self._folder, trees)
        text = json.dumps(progress)
        new = self._folder / broadcast(self._unused_name(step))
        arguments = {name: ocp.args.PyTreeSave(tree) for name, tree in trees.items()}
        self._orbax.save(_for_orbax(self._folder) / new.name, args=ocp.args.Composite(**arguments))
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), trees)
        self._pending = self._background.submit(self._finish, step, new, like, text, best)

    def wait(self, together: bool = True) -> None:
        """Waits for the save in progress; `together`: until all processes do. OSError: the last
        save has failed."""
        error = None if self._pending is None else self._pending.exception()
        self._pending = None
        if together:
            wait_for_all("checkpoint")
        self._remove_unfinished()
        if error is not None:
            raise error

    def _unused_name(self, step: int) -> str:
        """Returns a name for a new checkpoint that comes after all others of this step.

        A failed write may continue for a while, so its name is not used again.
        """
        names = self._used | {path.name for path in self._folder.glob("*")}
        matches = (_NAME.fullmatch(name) for name in names)
        numbers = [int(m[2] or 0) for m in matches if m and int(m[1]) == step]
        number = max(numbers, default=0 if isinstance(self._folder, Path) else -1) + 1
        name = f"{step:08d}.new{number}" if number else f"{step:08d}"
        self._used.add(name)
        return name

    def _finish(
        self, step: int, new: AnyPath, trees: dict[str, Any], progress: str, best: bool
    ) -> None:
        """Makes a checkpoint whole once its arrays are written and can be read back."""
        try:
            self._orbax.wait_until_finished()
            if is_coordinator():
                with _reader() as orbax:
                    for name, tree in trees.items():
                        stored = _stored_tree(orbax, _for_orbax(self._folder) / new.name / name)
                        require_same(name, _leaves_by_name(stored), _leaves_by_name(tree))
                for path in files.files_below(new).values():
                    if path.name == "commit_success.txt":  # of Orbax
                        path.unlink()  # holds an absolute path, which a copied run changes
                files.write_whole(new / _PROGRESS, progress)
                manifest.write(new, step, best)
                manifest.read(new)
                self._publish(step, new)
        except Exception as error:
            raise OSError(f"saving {manifest.describe(new)}: {_reason(error)}") from error

    def _publish(self, step: int, new: AnyPath) -> None:
        """Removes what the new checkpoint replaces: those of its step, the oldest ones, and of
        others the state with which training continues.

        Those of later steps are removed, too. They are damaged, since training has continued from
        an earlier one.
        """
        for path in self._folder.glob("*"):
            if (match := _NAME.fullmatch(path.name)) and int(match[1]) >= step and path != new:
                _remove(path)
        if isinstance(new, Path):
            new.rename(new.with_suffix(""))
        whole = _whole(self._folder)
        existing = [*whole]
        best = next((n for n in reversed(existing) if _is_best(whole[n])), None)
        kept = {*existing[-self._keep :], step, best}
        continued = {*existing[-_CONTINUED:], step, best}
        for old in existing:
            try:
                if old not in kept:
                    _remove(whole[old])
                elif old not in continued and (whole[old] / _STATE).exists():
                    manifest.drop(whole[old], _STATE)
            except (OSError, UserError) as error:  # which must not end training
                logger.warning("%s is not deleted: %s", manifest.describe(whole[old]), error)

    def _remove_unfinished(self) -> None:
        if is_coordinator():
            kept = {*_whole(self._folder).values(), *without_manifest(self._folder)}
            for path in self._folder.glob("*"):
                if _LEFTOVER.fullmatch(path.name) and path not in kept:
                    with contextlib.suppress(Exception):
                        files.remove_folder(path)


def steps(folder: AnyPath) -> list[int]:
    """Returns the steps of the whole checkpoints, ascending; none if the folder is missing."""
    return [*_whole(folder)]


def without_manifest(folder: AnyPath) -> list[AnyPath]:
    """Returns the checkpoints that have lost their manifests, ascending.

    They are known on a disk only, where a checkpoint has its final name once it is whole.
    """
    if not isinstance(folder, Path):
        return []
    named = [path for path in folder.glob("*") if path.name.isdigit()]
    return sorted(path for path in named if not (path / manifest.NAME).exists())


def require_manifests(folder: AnyPath) -> None:
    """UserError: a checkpoint has lost its manifest, which says whether it is the best one."""
    for path in without_manifest(folder):
        raise UserError(
            f"{manifest.describe(path)}: {manifest.NAME} is missing; restore it, delete "
            f"{path}, or name the step of another checkpoint"
        )


def best_step(folder: AnyPath) -> int | None:
    """Returns the last step that was saved as the best. UserError: a manifest is damaged."""
    newest_first = reversed(_whole(folder).items())
    return next((step for step, path in newest_first if manifest.read(path).best), None)


def restore(folder: AnyPath, step: int, tree: str, like: Any = None) -> Any:
    """Returns a tree of arrays as it was saved, bit for bit, in the structure of `like`.

    Leaves of `like` are arrays or `jax.ShapeDtypeStruct`. A restored leaf has the sharding of its
    leaf of `like` and is a NumPy array where that has none. Without `like` the tree consists of
    nested dictionaries and lists of NumPy arrays.

    UserError: the step or the tree does not exist, the format is another, a file is damaged, or
    names, shapes or types differ from those of `like`; the first differences are named.
    """
    path = _find(folder, step)
    manifest.verify(path, tree)
    place = _for_orbax(folder) / path.name / tree
    with _reader() as orbax:
        stored = _stored_tree(orbax, place)
        like = stored if like is None else like
        names, wanted = _leaves_by_name(stored), _leaves_by_name(like)
        require_same(f"{manifest.describe(path)}: {tree}", names, wanted)
        shardings = [getattr(wanted[name], "sharding", None) for name in names]
        on_host = ocp.RestoreArgs(restore_type=np.ndarray)
        arguments = [ocp.ArrayRestoreArgs(sharding=x) if x else on_host for x in shardings]
        arguments = jax.tree.unflatten(jax.tree.structure(stored), arguments)
        arguments = ocp.args.PyTreeRestore(restore_args=arguments)
        arrays = _leaves_by_name(orbax.restore(place, args=arguments))
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])


def progress(folder: AnyPath, step: int) -> dict[str, Any]:
    """Returns the `progress` that was saved. UserError: as `restore`."""
    path = _find(folder, step)
    manifest.verify(path, _PROGRESS)
    with about(f"{manifest.describe(path)}: {_PROGRESS}"):
        return files.parse_json((path / _PROGRESS).read_bytes())


def digest(folder: AnyPath, step: int, tree: str) -> str:
    """Returns the SHA-256 of the names and the contents of a tree's files. UserError: its manifest
    is damaged, or there is no such step."""
    listed = manifest.read(_find(folder, step)).files
    return files.json_digest({n: file for n, file in listed.items() if n.startswith(f"{tree}/")})


def average(folder: AnyPath, steps: Sequence[int]) -> Params:
    """Returns the mean of the parameters of several checkpoints, summed in float64, as float32.

    At most two trees are in memory at a time. UserError: there are no steps, or as `restore`.
    """
    if not steps:
        raise UserError(f"{folder}: no checkpoints to average")
    first, *others = steps
    total = jax.tree.map(lambda x: x.astype(np.float64), restore(folder, first, "weights"))
    for step in others:
        jax.tree.map(lambda a, b: np.add(a, b, out=a), total, restore(folder, step, "weights"))
    return jax.tree.map(lambda x: np.asarray(x / len(steps), np.float32), total)


def _for_orbax(folder: AnyPath) -> AnyPath:
    """Returns a path of `folder` below which Orbax can write and read."""
    if not isinstance(folder, Path):
        return folder
    folder = folder.absolute()
    return _alias(folder) if _NOT_FOR_ORBAX.search(str(folder)) else folder


@functools.cache
def _alias(folder: Path) -> Path:
    """Returns a link to `folder` from a temporary folder, which is deleted when Python ends."""
    temporary = tempfile.mkdtemp(prefix="transformer-jax-")
    files.temporaries.callback(shutil.rmtree, temporary, ignore_errors=True)
    link = Path(temporary) / "checkpoints"
    link.symlink_to(folder, target_is_directory=True)
    return link


def _reader() -> ocp.Checkpointer:
    # Otherwise Orbax would look for its commit_success.txt in object storage.
    options = ocp.options.AtomicityOptions(allow_legacy_atomic_rename=True)
    return ocp.Checkpointer(_handler(), atomicity_options=options)


def _stored_tree(orbax: ocp.Checkpointer, path: AnyPath) -> Any:
    """Returns what Orbax finds of a tree: names, shapes and types. UserError: it finds nothing."""
    stored = orbax.metadata(path).item_metadata
    if stored is None:
        raise UserError(f"{path}: Orbax finds no arrays in it")
    return stored.tree


def _whole(folder: AnyPath) -> dict[int, AnyPath]:
    """Returns the whole checkpoints by step, ascending; the last one of a step saved again."""
    paths: dict[tuple[int, int], AnyPath] = {}
    for path in folder.glob(f"*/{manifest.NAME}"):
        if match := _NAME.fullmatch(path.parent.name):
            paths[int(match[1]), int(match[2] or 0)] = path.parent
    return {step: paths[step, number] for step, number in sorted(paths)}


def _find(folder: AnyPath, step: int) -> AnyPath:
    """Returns the path of a checkpoint. UserError: there is none of this step."""
    path = _whole(folder).get(step) or folder / f"{step:08d}"
    if not path.is_dir():
        existing = ", ".join(map(str, steps(folder))) or "none"
        raise UserError(f"{manifest.describe(path)}: does not exist; there are: {existing}")
    return path


def _is_best(path: AnyPath) -> bool:
    """Returns whether a checkpoint was saved as the best; False if its manifest is damaged."""
    try:
        return manifest.read(path).best
    except UserError:  # loading the checkpoint reports it
        return False


def _remove(checkpoint: AnyPath) -> None:
    """Deletes a checkpoint. While it is being deleted, it has another name or no manifest."""
    if isinstance(checkpoint, Path):
        checkpoint = checkpoint.rename(checkpoint.with_suffix(f".old{secrets.token_hex(8)}"))
    (checkpoint / manifest.NAME).unlink(missing_ok=True)
    files.remove_folder(checkpoint)


def _handler() -> ocp.PyTreeCheckpointHandler:
    """Returns Orbax's handler for trees of arrays, without its files on shardings and chunks."""
    arrays = type_handlers.ArrayHandler(
        enable_write_sharding_file=False,
        # Devices that hold copies of a small array take longer to share its writing than one takes
        # to write it.
        min_slice_bytes_for_replica_parallel=2**20,
    )
    registry = type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (np.ndarray, type_handlers.NumpyHandler())
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _leaves_by_name(tree: Any) -> dict[str, Any]:
    """Returns the leaves by name, such as "encoder/layer_0/kernel".

    The names are the same for a tree and for what Orbax stores of it.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def require_same(where: str, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """OtherFormatError: arrays by name differ from those wanted in names, shapes or types; the
    message begins with `where`, and names the first differences."""

    def describe(leaves: dict[str, Any], name: str) -> str:
        return f"{leaves[name].dtype}{list(leaves[name].shape)}" if name in leaves else "nothing"

    wrong = [
        f"{name}: {describe(stored, name)} saved, {describe(wanted, name)} wanted"
        for name in sorted({*stored, *wanted})
        if describe(stored, name) != describe(wanted, name)
    ]
    if wrong:
        wrong[_NAMED:] = [f"and {len(wrong) - _NAMED} more"] if wrong[_NAMED:] else []
        raise manifest.OtherFormatError(f"{where} does not fit: {'; '.join(wrong)}")


def _require_space(folder: AnyPath, trees: dict[str, Any]) -> None:
    """Raises one OSError before anything is written if the disk has too little space."""
    if isinstance(folder, epath.Path):
        return
    need = sum(leaf.nbytes for leaf in jax.tree.leaves(trees))
    free = shutil.disk_usage(folder).free
    if need > free:
        raise OSError(f"no space left in {folder}: {need:,} bytes needed, {free:,} free")


def _reason(error: Exception) -> str:
    """Returns one line on why a file was not written."""
    code = re.search(r"os_error_code='([0-9]+)'", str(error))  # TensorStore's is no OSError
    if code:
        return os.strerror(int(code[1]))
    return getattr(error, "strerror", None) or str(error).partition("\n")[0]
