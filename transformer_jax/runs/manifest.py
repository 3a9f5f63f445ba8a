"""The manifest of a checkpoint: format, step, size and SHA-256 of each file, and its own digest.

It is written last, so that a checkpoint with a manifest is whole, and verified before anything is
loaded, so that a file that has changed since is found.
"""

import hashlib
import json
from typing import Any, NamedTuple

from transformer_jax import files
from transformer_jax.errors import UserError, about
from transformer_jax.files import AnyPath

FORMAT = 5
"""The format that is written and read."""

NAME = "manifest.json"


class OtherFormatError(UserError):
    """A checkpoint is of another format, or has other arrays. It is not damaged: another version
    can read it."""


class Manifest(NamedTuple):
    """The contents of a manifest."""

    best: bool  # no earlier checkpoint had a better score
    files: dict[str, Any]  # size and SHA-256 of each file, by its name


def write(checkpoint: AnyPath, step: int, best: bool) -> None:
    """Flushes the files of a checkpoint to the disk and writes its manifest."""
    listed = {}
    for name, path in sorted(_files(checkpoint).items()):
        files.flush_to_disk(path)
        listed[name] = _measure(path)
    _write(checkpoint, step, Manifest(best, listed))


def drop(checkpoint: AnyPath, part: str) -> None:
    """Deletes a folder of a checkpoint, which stays whole without it.

    First the manifest forgets its files, so that the process may be killed while they are deleted.
    """
    best, listed = read(checkpoint)
    left = {name: file for name, file in listed.items() if not name.startswith(f"{part}/")}
    _write(checkpoint, step_of(checkpoint), Manifest(best, left))
    files.remove_folder(checkpoint / part)


def _write(checkpoint: AnyPath, step: int, contents: Manifest) -> None:
    manifest = {"format": FORMAT, "step": step, **contents._asdict()}
    manifest["sha256"] = files.json_digest(manifest)
    files.write_whole(checkpoint / NAME, json.dumps(manifest, indent=1))


def read(checkpoint: AnyPath) -> Manifest:
    """Returns the manifest.

    UserError: it is missing or damaged. OtherFormatError: it is of another format.
    """
    where = describe(checkpoint)
    if not (checkpoint / NAME).exists():
        raise UserError(f"{where}: half-written, without {NAME}")
    with about(f"{where}: {NAME} is damaged"):
        values = files.parse_json((checkpoint / NAME).read_bytes())
    digest = values.pop("sha256", None) if isinstance(values, dict) else None
    match values:
        case {"format": int(version)} if version != FORMAT:
            raise OtherFormatError(f"{where}: format {version}: this version reads {FORMAT}")
        case {"format": int(), "step": int(step), "best": bool(best), "files": dict(listed)}:
            if step == step_of(checkpoint) and digest == files.json_digest(values):
                return Manifest(best, listed)
    raise UserError(f"{where}: {NAME} is damaged")


def verify(checkpoint: AnyPath, part: str) -> None:
    """Checks that the files of `part` are as they were saved.

    `part` is a folder or a file of the checkpoint; the files beside the folders are verified with
    it. UserError: as `read`, or a file is missing, added or changed.
    """
    where, listed, found = describe(checkpoint), read(checkpoint).files, _files(checkpoint)
    parts = {name.split("/")[0] for name in listed}
    if part not in parts:
        raise UserError(f"{where}: has no {part!r}; it has: {', '.join(sorted(parts))}")
    for name in sorted({*listed, *found}):
        if "/" in name and not name.startswith(f"{part}/"):
            continue
        if name not in found:
            raise UserError(f"{where}: {name} is missing")
        if name not in listed:
            raise UserError(f"{where}: {name} is not in {NAME}")
        with about(f"{where}: {name} cannot be read"):  # by a disk that fails
            same = _measure(found[name]) == listed[name]
        if not same:
            raise UserError(f"{where}: {name} is damaged: its size or digest differs from {NAME}")


def step_of(checkpoint: AnyPath) -> int:
    """Returns the step of a checkpoint, whose name is STEP or begins with "STEP."."""
    return int(checkpoint.name.partition(".")[0])


def describe(checkpoint: AnyPath) -> str:
    """Returns "checkpoint STEP in FOLDER", as messages name a checkpoint."""
    return f"checkpoint {step_of(checkpoint)} in {checkpoint.parent}"


def _files(checkpoint: AnyPath) -> dict[str, AnyPath]:
    """Returns all files of a checkpoint except the manifest, by their names in the manifest."""
    return {name: path for name, path in files.files_below(checkpoint).items() if name != NAME}


def _measure(path: AnyPath) -> list[Any]:
    """Returns the size and the SHA-256 of a file."""
    file: Any
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return [file.tell(), digest]
