"""Upgrades what a checkpoint of an older format holds to the names of today."""

from __future__ import annotations

from typing import Any

from transformer_jax.runs import manifest

RENAMED: dict[int, dict[str, str]] = {
    1: {
        "training/extra/reward": "training/averages/log_likelihood",
        "progress/stale": "progress/evaluations_since_best",
    }
}
"""Leaves that were renamed after a format: {format: {"TREE/old/path": "TREE/new/path"}}.

TREE is a tree of the checkpoint ("weights", "training") or "progress". To rename a leaf, add the
entry under the current `manifest.FORMAT` and add 1 to `manifest.FORMAT`.
"""


def upgrade(version: int, tree: str, values: Any) -> Any:
    """Returns the nested dictionaries of `tree`, stored in format `version`, with today's names."""
    values = {tree: values}
    for older in range(version, manifest.FORMAT):
        for old, new in RENAMED.get(older, {}).items():
            values = _move(values, old.split("/"), new.split("/"))
    return values[tree]


def _move(values: Any, old: list[str], new: list[str]) -> Any:
    """Moves the leaf at the path `old`, if there is one, to the path `new`."""
    leaf = values
    for name in old:
        if not isinstance(leaf, dict) or name not in leaf:
            return values
        leaf = leaf[name]
    return _with(_without(values, old), new, leaf)


def _without(values: dict[str, Any], path: list[str]) -> dict[str, Any]:
    """Returns the dictionaries without the leaf at `path` and without those that become empty."""
    name, *rest = path
    inner = _without(values[name], rest) if rest else {}
    others = {key: value for key, value in values.items() if key != name}
    return others | {name: inner} if inner else others


def _with(values: dict[str, Any], path: list[str], leaf: Any) -> dict[str, Any]:
    name, *rest = path
    return values | {name: _with(values.get(name, {}), rest, leaf) if rest else leaf}
