"""Initializes parameters with those of another run, whose vocabulary may be another one."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from transformer_jax.models.parameter_paths import by_path, select, split, to_tree, vocabulary_side
from transformer_jax.parallel.parameters import shard_tree
from transformer_jax.runs.checkpoint import require_same
from transformer_jax.runs.run import Run
from transformer_jax.text.spelling import Spelling, spell
from transformer_jax.training.setup import Setup
from transformer_jax.types import Params


def params_from(source: Run, setup: Setup, parts: Sequence[str] = ()) -> tuple[Params, list[str]]:
    """Returns the parameters that a run takes from `source`, and lines that say which these are.

    parts: as in `select`; none: all. The row of a piece that `source` does not have is the mean of
    the rows of the pieces that spell it there. UserError: a pattern of `parts` is wrong, or
    parameters have other shapes; the message names the first ones.
    """
    step = source.best_step()
    params, wanted = source.params(step), by_path(setup.abstract_state.params)
    total = sum(leaf.size for leaf in wanted.values())
    origin, others = f"run {source.folder}, step {step}", ""
    if parts:
        selected = select(parts, wanted, "--init-parts")
        params, wanted = split(params, parts)[0], {path: wanted[path] for path in selected}
        others = f" ({', '.join(parts)}); the others are random"
    leaves = by_path(params)
    spellings = _spellings(source, setup, {vocabulary_side(path) for path in leaves})
    for path, leaf in leaves.items():
        if spelling := spellings.get(vocabulary_side(path)):
            leaves[path] = _rows(leaf, spelling)
    require_same(f"--init-from={source.folder}: step {step}", leaves, wanted)
    count = sum(leaf.size for leaf in wanted.values())
    lines = [f"parameters: {count:,} of {total:,} are those of {origin}{others}"]
    joint = setup.tokenizers.source is setup.tokenizers.target
    lines += [f"{'' if joint else f'{s} '}embeddings: {each}" for s, each in spellings.items()]
    return shard_tree(to_tree(leaves), setup.mesh), [*dict.fromkeys(lines)]


def _spellings(source: Run, setup: Setup, sides: set[Any]) -> dict[Any, Spelling]:
    """Returns how each of the sides whose vocabulary is another one is spelled."""
    pairs = zip(("source", "target"), setup.tokenizers, source.tokenizers, strict=True)
    return {
        side: spell(new, old)
        for side, new, old in pairs
        if side in sides and new.digest != old.digest
    }


def _rows(leaf: np.ndarray, spelling: Spelling) -> np.ndarray:
    """Returns a row for each new id: the mean of those of the old ids that spell it."""
    lengths = np.array([len(ids) for ids in spelling.ids])
    sums = np.add.reduceat(leaf[np.concatenate(spelling.ids)], np.cumsum(lengths) - lengths)
    return sums / lengths.astype(leaf.dtype).reshape(-1, *[1] * (leaf.ndim - 1))
