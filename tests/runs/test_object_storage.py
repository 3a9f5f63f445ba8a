"""Runs and checkpoints in a bucket, where nothing can be renamed or appended to."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from object_store import Bucket, Object

from transformer_jax.errors import UserError
from transformer_jax.files import AnyPath, files_below, find_path
from transformer_jax.runs import checkpoint, manifest, run
from transformer_jax.runs.checkpoint import Checkpoints
from transformer_jax.training.reporters import MetricsFile, read_metrics


@pytest.fixture
def folder(bucket: Bucket, request: pytest.FixtureRequest) -> epath.Path:
    """A folder of its own for each test."""
    bucket.objects.clear()
    path = find_path(f"gs://bucket/runs/{request.node.originalname}")
    assert isinstance(path, epath.Path)
    return path


def save(folder: AnyPath, step: int, keep: int = 9, **progress: Any) -> None:
    with Checkpoints(folder, keep) as checkpoints:
        tree = {"weights": {"x": jnp.full(3, step)}, "training": {"y": jnp.arange(4)}}
        checkpoints.save(step, tree, progress)


def names(folder: AnyPath) -> list[str]:
    return sorted({name.split("/")[0] for name in files_below(folder)})


@pytest.fixture
def kill(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function (owner, name, act) that leaves the bucket as a process does that is killed in
    `act` before it calls `name`."""

    def killed_before(owner: Any, name: str, act: Callable[[], Any]) -> None:
        left: list[dict[str, Object]] = []
        function = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            left.append(dict(bucket.objects))
            return function(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, call)
            act()
        bucket.objects = left[0]

    return killed_before


def copy(source: AnyPath, target: AnyPath) -> None:
    for name, path in files_below(source).items():
        if isinstance(target, Path):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(path.read_bytes())


def test_a_checkpoint_counts_once_its_manifest_is_written(folder: epath.Path, kill: Any) -> None:
    save(folder, 1)
    kill(manifest, "write", lambda: save(folder, 2))
    assert names(folder) == ["00000001", "00000002"]
    assert len(files_below(folder / "00000002" / "weights")) > 3  # the arrays are there
    assert checkpoint.steps(folder) == [1]
    with pytest.raises(UserError, match=r"checkpoint 2 in gs://.*: half-written"):
        checkpoint.restore(folder, 2, "weights")
    save(folder, 3)
    assert names(folder) == ["00000001", "00000003"]


def test_a_checkpoint_counts_until_its_manifest_is_deleted(folder: epath.Path, kill: Any) -> None:
    save(folder, 1)
    kill(checkpoint.files, "remove_folder", lambda: save(folder, 2, keep=1))
    assert names(folder) == ["00000001", "00000002"]
    assert checkpoint.steps(folder) == [2]
    save(folder, 3)
    assert names(folder) == ["00000002", "00000003"]


def test_a_step_saved_again_is_never_lost(folder: epath.Path, kill: Any) -> None:
    save(folder, 1, attempt=1)
    kill(manifest, "write", lambda: save(folder, 1, attempt=2))
    assert checkpoint.progress(folder, 1) == {"attempt": 1}
    kill(checkpoint, "_remove", lambda: save(folder, 1, attempt=3))
    assert names(folder) == ["00000001", "00000001.new1"]
    assert checkpoint.progress(folder, 1) == {"attempt": 3}
    save(folder, 1, attempt=4)
    assert names(folder) == ["00000001.new2"]
    assert checkpoint.progress(folder, 1) == {"attempt": 4}
    np.testing.assert_array_equal(checkpoint.restore(folder, 1, "weights")["x"], [1, 1, 1])


def test_a_run_is_made_in_a_folder_of_the_console(
    folder: epath.Path, bucket: Bucket, fixtures: Path
) -> None:
    """Which makes an empty object of it."""
    for name in ("", "inner/"):
        bucket.objects[f"runs/{folder.name}/{name}"] = Object(b"", 1)
    assert not run.exists(folder)
    run.create(replace(run.load(fixtures / "run"), folder=folder))
    save(folder / "checkpoints", 1)
    assert checkpoint.steps(run.load(folder).checkpoints) == [1]


def test_a_copied_run_is_the_same(folder: epath.Path, fixtures: Path, tmp_path: Path) -> None:
    """Copied from a disk to a bucket and, with a step that was saved again, back to a disk."""
    old = run.load(fixtures / "run")
    copy(fixtures / "run", folder)
    copied = run.load(str(folder))
    assert checkpoint.steps(copied.checkpoints) == [2500]
    with Checkpoints(copied.checkpoints, keep=1) as checkpoints:
        checkpoints.save(2500, {"weights": copied.params()}, {})
    assert names(copied.checkpoints) == ["00002500.new1"]
    copy(folder, tmp_path)
    assert jax.tree.all(jax.tree.map(np.array_equal, run.load(tmp_path).params(), old.params()))


def test_what_others_write_is_seen(folder: epath.Path, bucket: Bucket, fixtures: Path) -> None:
    """What TensorStore or another machine writes, while this process has listed the folder."""
    prefix = f"runs/{folder.name}/"
    bucket.objects[f"{prefix}tokenizer.model"] = Object(b"x", 1)
    with pytest.raises(UserError, match=r"run gs://.* holds files but no config\.json"):
        run.load(folder)
    for name, path in files_below(fixtures / "run").items():
        bucket.objects[prefix + name] = Object(path.read_bytes(), 2)
    assert checkpoint.steps(run.load(folder).checkpoints) == [2500]


def test_metrics_are_written_anew(folder: epath.Path, bucket: Bucket) -> None:
    def shown() -> list[int]:
        path = folder / "metrics.jsonl"
        return [r["step"] for r in read_metrics(path)] if path.exists() else []

    with MetricsFile(folder / "metrics.jsonl") as metrics:
        metrics.cut(0, 0)
        metrics({"kind": "train", "step": 1})
        metrics({"kind": "message", "step": 1, "text": "not in the file"})
        assert shown() == []
        metrics({"kind": "evaluation", "step": 2, "samples": ["a\u2028b"]})
        assert shown() == [1, 2]
        metrics({"kind": "train", "step": 3})
        metrics.flush()
        assert shown() == [1, 2, 3]
        generation = bucket.objects[f"runs/{folder.name}/metrics.jsonl"].generation
        metrics.flush()
        assert bucket.objects[f"runs/{folder.name}/metrics.jsonl"].generation == generation
        metrics({"kind": "train", "step": 4})
    assert shown() == [1, 2, 3, 4]
    with MetricsFile(folder / "metrics.jsonl") as metrics:
        metrics.cut(2, 2)
        assert shown() == [1, 2]
        generation = bucket.objects[f"runs/{folder.name}/metrics.jsonl"].generation
        metrics.flush()
        assert bucket.objects[f"runs/{folder.name}/metrics.jsonl"].generation == generation
        metrics({"kind": "train", "step": 3})
    assert shown() == [1, 2, 3]
