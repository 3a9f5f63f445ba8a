"""Damages every file of a run, one at a time, and tells what continuing the run does about it."""

import hashlib
import logging
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from transformer_jax.config import differences
from transformer_jax.errors import UserError
from transformer_jax.files import AnyPath, files_below
from transformer_jax.runs import checkpoint, run
from transformer_jax.runs.checkpoint import Checkpoints
from transformer_jax.runs.run import Run
from transformer_jax.training.reporters import MetricsFile
from transformer_jax.training.resume import checkpoint_trees, restored
from transformer_jax.training.setup import Setup, prepare

TREES = ("weights", "training")
EDITS: dict[str, Callable[[Any], Any]] = {
    "of another shape": lambda array: array[..., :-1],
    "of another type": lambda array: array.astype(np.float16),
}
"""Changes of an array."""

SILENT = ("other values", "stepped back unsaid")
"""Outcomes of which nothing was said."""


class Damage(NamedTuple):
    """One damage to one file, or to one array of a checkpoint."""

    file: str  # relative to the run, or "checkpoints/STEP/TREE: LEAF"
    kind: str
    step: int  # of the newest checkpoint that the run has meanwhile
    cause: Callable[[Path], Any]  # damages the file in a copy of the run


def damage_campaign(
    folder: Path,
    choose: Callable[[list[Damage]], list[Damage]] = lambda damages: damages,
    seed: int = 0,
) -> dict[str, Any]:
    """Returns {"damaged_files": [{file, kind, outcome, said}], "silent_loads": number of them}.

    folder: a run on a disk with two checkpoints or more; copies of it are damaged. choose: returns
    the damages to try of all. seed: of the bits that are flipped. A checkpoint is damaged while it
    is the newest one, so that the run must step back to the one before it, and must refuse if the
    first one is damaged. Outcomes:

    - "stepped back": the file was named, and the values are those of the checkpoint before it.
    - "refused": the file was named in one line, and nothing on the disk has changed.
    - "named": the file was named, and all values are those that were saved.
    - "harmless": nothing was said, and all values are those that were saved.
    - "other values", "stepped back unsaid": silent loads.
    - Any other text: the run did something else, which is described.
    """
    intact = replace(run.load(folder), config=run.load_config(folder))
    setup = prepare(intact.config, intact.tokenizers)
    checkpoints, rows = intact.checkpoints, list[dict[str, str]]()
    stored = {
        step: (array_digests(checkpoints, step), checkpoint.progress(checkpoints, step))
        for step in checkpoint.steps(checkpoints)
    }
    for damage in choose([*_damages(intact, setup, random.Random(seed))]):
        with tempfile.TemporaryDirectory() as temporary:
            copy = Path(shutil.copytree(folder, Path(temporary) / "run"))
            for step in stored:
                if step > damage.step:
                    shutil.rmtree(copy / "checkpoints" / f"{step:08d}")
            damage.cause(copy)
            outcome, said = _outcome(damage, copy, intact, setup, stored)
        rows.append({"file": damage.file, "kind": damage.kind, "outcome": outcome, "said": said})
    silent = sum(row["outcome"] in SILENT for row in rows)
    return {"damaged_files": rows, "silent_loads": silent}


def array_digests(folder: AnyPath, step: int) -> dict[str, str]:
    """Returns the SHA-256 of each array of a checkpoint, by "TREE/LEAF"."""
    return digests({name: checkpoint.restore(folder, step, name) for name in TREES})


def digests(trees: Any) -> dict[str, str]:
    """Returns the SHA-256 of each array of trees, with its type and shape, by name."""

    def digest(leaf: Any) -> str:
        array = np.asarray(leaf)
        text = f"{array.dtype} {array.shape}".encode()
        return hashlib.sha256(text + array.tobytes()).hexdigest()

    leaves = jax.tree_util.tree_leaves_with_path(trees)
    return {_name(path): digest(leaf) for path, leaf in leaves}


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the contents of all files below a folder, by name."""
    return {name: path.read_bytes() for name, path in sorted(files_below(folder).items())}


def _damages(intact: Run, setup: Setup, draw: random.Random) -> Iterator[Damage]:
    """Yields all damages to a run."""
    files = contents(Path(str(intact.folder)))
    steps = checkpoint.steps(intact.checkpoints)
    others = dict(zip(steps, [steps[1], *steps], strict=False))
    for name, content in files.items():
        in_checkpoint = name.startswith("checkpoints/")
        step = int(Path(name).parts[1]) if in_checkpoint else steps[-1]
        flipped = bytearray(content)
        bit = draw.randrange(8 * len(content))
        flipped[bit // 8] ^= 1 << bit % 8
        kinds = {
            "cut in half": content[: len(content) // 2],
            "emptied": b"",
            "appended to": content + b"appended\n",
            "replaced by an older one": in_checkpoint and _older(name, files, others[step]),
            "bit 1 flipped": bytes(flipped),
        }
        for kind, changed in kinds.items():
            if isinstance(changed, bytes) and changed != content:
                yield Damage(name, kind, step, partial(_write, name, changed))
        yield Damage(name, "deleted", step, partial(_write, name, None))
    older = partial(_write_older, intact)
    yield Damage("config.json", "replaced by an older one", steps[-1], older)
    for step in steps:
        for tree, like in checkpoint_trees(setup.abstract_state).items():
            leaves = jax.tree_util.tree_leaves_with_path(like)
            leaf = _name(max(leaves, key=lambda item: item[1].size)[0])
            for kind, edit in EDITS.items():
                cause = partial(_edit, step, tree, leaf, edit)
                yield Damage(f"checkpoints/{step:08d}/{tree}: {leaf}", kind, step, cause)


def _older(name: str, files: dict[str, bytes], step: int) -> bytes | None:
    """Returns the same file of another checkpoint, or one of its folder: some names are random."""
    place = Path("checkpoints", f"{step:08d}", *Path(name).parts[2:])
    beside = [each for each in files if Path(each).parent == place.parent]
    return files.get(place.as_posix(), files[beside[-1]] if beside else None)


def _write(name: str, content: bytes | None, copy: Path) -> None:
    """Writes a file anew; None: deletes it."""
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_bytes(content)


def _write_older(intact: Run, copy: Path) -> None:
    """Writes the config of the run before it was continued with another `train.keep`."""
    options = replace(intact.config.train, keep=intact.config.train.keep + 1)
    run.update(replace(intact, folder=copy), replace(intact.config, train=options))


def _edit(step: int, tree: str, leaf: str, edit: Callable[[Any], Any], copy: Path) -> None:
    """Saves a checkpoint again with one array changed, and with right digests."""
    folder = copy / "checkpoints"
    trees = {name: checkpoint.restore(folder, step, name) for name in TREES}
    trees[tree] = jax.tree_util.tree_map_with_path(
        lambda path, array: edit(array) if _name(path) == leaf else array, trees[tree]
    )
    with Checkpoints(folder, keep=99) as checkpoints:
        checkpoints.save(step, trees, checkpoint.progress(folder, step))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _outcome(
    damage: Damage, copy: Path, intact: Run, setup: Setup, stored: dict[int, Any]
) -> tuple[str, str]:
    """Returns what continuing a damaged copy does, and what it says."""
    before = contents(copy)
    logger, handler = logging.getLogger("transformer_jax"), BufferingHandler(1000)
    logger.addHandler(handler)
    try:
        step, values, same_run = _continue(copy, intact, setup)
    except UserError as error:
        text = str(error)
        if "\n" in text or contents(copy) != before or not _is_named(damage, text):
            return "refused, but not in one line, or unnamed, or something has changed", text
        return "refused", text
    except Exception as error:  # a defect of the run, to be reported with the others
        return f"failed: {type(error).__name__}", str(error)
    finally:
        logger.removeHandler(handler)
    text = "; ".join(record.getMessage() for record in handler.buffer)
    named = _is_named(damage, text)
    if step == 0 or values != stored[step] or not same_run:
        return "warned, but other values" if text else "other values", text
    if step == damage.step:
        return "named" if named else "harmless", text
    if step != max(older for older in stored if older < damage.step):
        return "stepped back too far", text
    return "stepped back" if named else "stepped back unsaid", text


def _continue(copy: Path, intact: Run, setup: Setup) -> tuple[int, Any, bool]:
    """Does what training does before its first step. Returns the step, all restored values, and
    whether config, tokenizers and provenance are those of the intact run."""
    run.exists(copy)
    old = replace(run.load(copy), config=run.load_config(copy))
    same = not differences(intact.config, old.config) and old.provenance == intact.provenance
    same &= [side.digest for side in old.tokenizers] == [side.digest for side in intact.tokenizers]
    if (stored := restored(old, setup)) is None:
        return 0, None, same
    state, progress = stored
    step, every = int(state.step), old.config.train.log_every
    MetricsFile(copy / "metrics.jsonl").cut(step, progress.evaluated, expected=step - step % every)
    return step, (digests(checkpoint_trees(state)), asdict(progress)), same


def _is_named(damage: Damage, text: str) -> bool:
    """Returns whether a text names the damaged file: relative to its checkpoint, if it is in one,
    with the step of that."""
    if not damage.file.startswith("checkpoints/"):
        return damage.file in text
    file, _, leaf = damage.file.split("/", 2)[2].partition(": ")
    return f"checkpoint {damage.step} in " in text and file in text and leaf in text
