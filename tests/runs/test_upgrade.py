"""Checkpoints of older formats are restored with today's names."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.runs import checkpoint, manifest, upgrade
from transformer_jax.runs.checkpoint import Checkpoints


@pytest.fixture
def renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of format 1, read where two formats have renamed leaves since."""
    training = {"extra": {"reward": jnp.array(3.0)}, "opt": [{"mu": jnp.ones(2)}], "step": 7}
    trees = {
        "weights": {"a": {"b": jnp.zeros(2), "c": jnp.ones(3)}},
        "training": training | {"step": jnp.array(7)},
    }
    monkeypatch.setattr(manifest, "FORMAT", 1)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, trees, {"position": 5, "stale": 2})
    monkeypatch.setattr(manifest, "FORMAT", 3)
    names = {
        1: {
            "training/extra/reward": "training/averages/reward",
            "weights/a/b": "weights/z",
            "progress/stale": "progress/evaluations_since_best",
            "training/missing": "training/nothing",
        },
        2: {"training/averages/reward": "training/averages/log_likelihood"},
    }
    monkeypatch.setattr(upgrade, "RENAMED", names)
    return tmp_path


def test_renamed_leaves_fit_the_tree_of_today(renamed: Path) -> None:
    like = {
        "averages": {"log_likelihood": jnp.zeros(())},
        "opt": [{"mu": jnp.zeros(2)}],
        "step": jnp.array(0),
    }
    found = checkpoint.restore(renamed, 1, "training", like)
    assert float(found["averages"]["log_likelihood"]) == 3.0
    assert np.all(found["opt"][0]["mu"] == 1)
    assert int(found["step"]) == 7
    del like["averages"]
    missing = "averages/log_likelihood: float32\\[\\] saved, nothing wanted"
    with pytest.raises(ValueError, match=missing):
        checkpoint.restore(renamed, 1, "training", like)


def test_renamed_leaves_are_restored_without_a_tree_too(renamed: Path) -> None:
    found = checkpoint.restore(renamed, 1, "weights")
    assert {name: np.shape(leaf) for name, leaf in found["a"].items()} == {"c": (3,)}
    assert found["z"].shape == (2,)
    assert "a" in checkpoint.average(renamed, [1])


def test_progress_is_renamed(renamed: Path) -> None:
    assert checkpoint.progress(renamed, 1) == {"position": 5, "evaluations_since_best": 2}


def test_the_format_of_today_is_not_renamed(renamed: Path) -> None:
    with Checkpoints(renamed, keep=2) as checkpoints:
        checkpoints.save(2, {"weights": {"a": {"b": jnp.zeros(2)}}}, {"stale": 1})
    assert checkpoint.restore(renamed, 2, "weights")["a"]["b"].shape == (2,)
    assert checkpoint.progress(renamed, 2) == {"stale": 1}
