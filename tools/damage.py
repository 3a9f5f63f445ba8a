"""Damages every file of a run, one at a time, and records what continuing the run does about it.

    python -m tools.damage RUN

Prints JSON. Works on copies: the run itself is not changed. Needs the corpora of the run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from transformer_jax.config import differences
from transformer_jax.errors import UserError
from transformer_jax.runs import checkpoint, run
from transformer_jax.runs.checkpoint import Checkpoints
from transformer_jax.runs.run import Run
from transformer_jax.training.reporters import MetricsFile
from transformer_jax.training.resume import checkpoint_trees, restored
from transformer_jax.training.setup import Setup, prepare

FLIPS = 1
"""Number of bits that are flipped in each file, one after the other."""

LOG = "metrics.jsonl"

SILENT = ("other values", "stepped back unsaid")
"""Outcomes of which nothing was said."""


class Case(NamedTuple):
    """One damage to one file, or to one array of a checkpoint."""

    file: str  # relative to the run, or "checkpoints/STEP/TREE: LEAF"
    kind: str
    step: int  # of the newest checkpoint that the run has meanwhile
    damage: Callable[[Path], None]  # of the file in a copy of the run


def damage_campaign(
    folder: Path, choose: Callable[[list[Case]], list[Case]] = lambda cases: cases, seed: int = 0
) -> dict[str, Any]:
    """Returns {"damaged_files": [{file, kind, outcome, said}], "silent_loads": number of them}.

    folder: a run on a disk with two checkpoints or more. choose: returns the cases to try of all
    cases. seed: of the bits that are flipped. A checkpoint is damaged while it is the newest one,
    so that the run must step back to the one before it, and must refuse if the first one is
    damaged. Outcomes:

    - "stepped back": the file was named, and the values are those of the checkpoint before it.
    - "refused": the file was named in one line, and nothing on the disk has changed.
    - "named": the file was named, and all values are those that were saved.
    - "harmless": nothing was said, and all values are those that were saved.
    - "other values", "stepped back unsaid": silent loads.
    - Any other text: the run did something else, which is described.
    """
    config = run.load_config(folder)
    intact = replace(run.load(folder), config=config)
    setup = prepare(config, intact.tokenizers)
    known = cache(partial(_stored, intact, setup))
    steps = checkpoint.steps(intact.checkpoints)
    draw, rows = random.Random(seed), list[dict[str, str]]()
    with tempfile.TemporaryDirectory() as temporary:
        for case in choose([*_cases(intact, setup, Path(temporary), draw)]):
            copy = Path(temporary) / "run"
            shutil.copytree(folder, copy)
            for step in steps:
                if step > case.step:
                    shutil.rmtree(copy / "checkpoints" / f"{step:08d}")
            case.damage(copy)
            outcome, said = _outcome(case, copy, intact, setup, known)
            rows.append({"file": case.file, "kind": case.kind, "outcome": outcome, "said": said})
            shutil.rmtree(copy)
    return {
        "damaged_files": rows,
        "silent_loads": sum(row["outcome"] in SILENT for row in rows),
    }


def _cases(intact: Run, setup: Setup, temporary: Path, draw: random.Random) -> Iterator[Case]:
    """Returns all damages to a run."""
    root = Path(str(intact.folder))
    steps = checkpoint.steps(intact.checkpoints)
    for path in sorted(path for path in root.iterdir() if path.is_file()):
        older = _older_config(intact, temporary) if path.name == "config.json" else None
        yield from _file_cases(path.name, path, older, steps[-1], draw)
    for step, other in zip(steps, [steps[1], *steps], strict=False):
        folder = root / "checkpoints" / f"{step:08d}"
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(root).as_posix()
            older = _counterpart(path, folder, f"{other:08d}")
            yield from _file_cases(name, path, older, step, draw)
        for tree, like in checkpoint_trees(setup.abstract_state).items():
            yield from _array_cases(tree, like, step)


def _file_cases(
    name: str, path: Path, older: bytes | None, step: int, draw: random.Random
) -> Iterator[Case]:
    content = path.read_bytes()
    kinds = {
        "cut in half": content[: len(content) // 2],
        "emptied": b"",
        "appended to": content + b"appended\n",
        "replaced by an older one": older,
    }
    for i in range(min(FLIPS, 8 * len(content))):
        bit = draw.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        kinds[f"bit {i + 1} flipped"] = bytes(flipped)
    for kind, changed in kinds.items():
        if changed is not None and changed != content:
            yield Case(name, kind, step, _writer(name, changed))
    yield Case(name, "deleted", step, lambda copy: (copy / name).unlink())


def _writer(name: str, content: bytes) -> Callable[[Path], None]:
    def write(copy: Path) -> None:
        (copy / name).write_bytes(content)

    return write


def _array_cases(tree: str, like: Any, step: int) -> Iterator[Case]:
    """Saves a checkpoint again with its largest array changed; the digests are right."""
    edits: dict[str, Callable[[Any], Any]] = {
        "of another shape": lambda leaf: leaf[..., :-1],
        "of another type": lambda leaf: leaf.astype(np.float16),
    }
    largest, _ = max(jax.tree_util.tree_leaves_with_path(like), key=lambda item: item[1].size)
    for kind, edit in edits.items():

        def change(path: Any, leaf: Any, edit: Callable[[Any], Any] = edit) -> Any:
            return edit(leaf) if _name(path) == _name(largest) else leaf

        def damage(copy: Path, change: Callable[..., Any] = change) -> None:
            folder = copy / "checkpoints"
            names = ("weights", "training")
            trees = {name: checkpoint.restore(folder, step, name) for name in names}
            trees[tree] = jax.tree_util.tree_map_with_path(change, trees[tree])
            with Checkpoints(folder, keep=99) as checkpoints:
                checkpoints.save(step, trees, checkpoint.progress(folder, step))

        yield Case(f"checkpoints/{step:08d}/{tree}: {_name(largest)}", kind, step, damage)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _older_config(intact: Run, temporary: Path) -> bytes:
    """Returns the config.json of the run before it was continued with another `train.keep`."""
    folder = temporary / "older"
    folder.mkdir()
    shutil.copy(intact.folder / "config.json", folder)
    config = intact.config
    earlier = replace(config, train=replace(config.train, keep=config.train.keep + 1))
    run.update(replace(intact, folder=folder), earlier)
    return (folder / "config.json").read_bytes()


def _counterpart(path: Path, folder: Path, other: str) -> bytes | None:
    """Returns the same file of another checkpoint; data files have names of their own in each."""
    place = folder.with_name(other) / path.relative_to(folder)
    if not place.exists():
        index = sorted(path.parent.iterdir()).index(path)
        files = sorted(place.parent.iterdir()) if place.parent.exists() else []
        if not files:
            return None
        place = files[min(index, len(files) - 1)]
    return place.read_bytes()


def _outcome(
    case: Case, copy: Path, intact: Run, setup: Setup, known: Callable[[int], str]
) -> tuple[str, str]:
    """Returns what continuing a damaged copy does, and what it says."""
    before = _digests(copy)
    with _warnings() as said:
        try:
            step, values, same_run = _continue(copy, intact, setup)
        except UserError as error:
            text = str(error)
            if "\n" in text or _digests(copy) != before or not _names(case, text):
                return "refused, but not in one line, or unnamed, or something has changed", text
            return "refused", text
        except Exception as error:  # a defect of the run, to be reported with the others
            return f"failed: {type(error).__name__}", str(error)
    text = "; ".join(said)
    named = _names(case, text)
    if step == 0 or values != known(step) or not same_run:
        return "other values" if not said else "warned, but other values", text
    if step == case.step:
        return "named" if named else "harmless", text
    if step != max(known for known in checkpoint.steps(intact.checkpoints) if known < case.step):
        return "stepped back too far", text
    return "stepped back" if named else "stepped back unsaid", text


def _continue(copy: Path, intact: Run, setup: Setup) -> tuple[int, str, bool]:
    """Does what the trainer does before its first step. Returns the step, a digest of all restored
    values, and whether config and tokenizers are those of the intact run."""
    run.exists(copy)
    old = replace(run.load(copy), config=run.load_config(copy))
    same = not differences(intact.config, old.config)
    same &= [t.digest for t in old.tokenizers] == [t.digest for t in intact.tokenizers]
    same &= old.provenance == intact.provenance
    found = restored(old, setup)
    if found is None:
        return 0, "", same
    state, progress = found
    step, every = int(state.step), old.config.train.log_every
    MetricsFile(copy / LOG).cut(step, progress.evaluated, expected=step - step % every)
    return step, _digest(checkpoint_trees(state), asdict(progress)), same


def _stored(intact: Run, setup: Setup, step: int) -> str:
    """Returns the digest of the values that a checkpoint stores."""
    trees = {
        name: checkpoint.restore(intact.checkpoints, step, name, like)
        for name, like in checkpoint_trees(setup.abstract_state).items()
    }
    return _digest(trees, checkpoint.progress(intact.checkpoints, step))


def _digest(trees: Any, progress: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(progress, sort_keys=True).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _names(case: Case, text: str) -> bool:
    """Returns whether a text names the damaged file: relative to its checkpoint, if it is in one,
    with the step of that."""
    parts = case.file.split("/", 2)
    if parts[0] != "checkpoints":
        return case.file in text
    file, _, leaf = parts[2].partition(": ")
    return f"checkpoint {case.step} in " in text and file in text and leaf in text


def _digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collects the warnings that the package logs."""
    said: list[str] = []
    logger, handler = logging.getLogger("transformer_jax"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def main() -> None:
    """Damages a copy of a run and prints what continuing it did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    print(json.dumps(damage_campaign(parser.parse_args().run), indent=1))


if __name__ == "__main__":
    main()
