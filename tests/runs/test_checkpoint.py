"""Checkpoints come back bit for bit or not at all."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.config import Config, OptimizerConfig
from transformer_jax.errors import UserError
from transformer_jax.files import AnyPath, files_below, json_digest
from transformer_jax.parallel.mesh import make_mesh, replicate
from transformer_jax.runs import checkpoint, manifest
from transformer_jax.runs.checkpoint import Checkpoints
from transformer_jax.runs.manifest import FORMAT
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.step import TrainState, init_state


def make_params(scale: float = 1.0) -> dict[str, Any]:
    bits = np.array([0x80000000, 0x7FC12345, 0xFF800000, 1], np.uint32)  # -0, NaN, -inf, tiny
    return {
        "decoder": {"layer_0": {"kernel": scale * jnp.arange(12.0).reshape(3, 4) / 7}},
        "encoder": {"odd": jnp.asarray(bits.view(np.float32)), "half": jnp.ones(5, jnp.bfloat16)},
    }


def make_state() -> TrainState:
    """A state after one update, with a moving average that differs from the parameters."""
    config = Config(optimizer=OptimizerConfig(clip_norm=1.0))
    optimizer = make_optimizer(config, make_params())
    state = init_state(make_params(), optimizer, ema=0.9)
    _, opt_state = optimizer.update(make_params(2.0), state.opt_state, state.params)
    return state._replace(step=state.step + 1, opt_state=opt_state, ema=make_params(3.0))


def save(folder: AnyPath, *steps: int, best: int = 0, keep: int = 9) -> None:
    with Checkpoints(folder, keep) as checkpoints:
        for step in steps:
            trees = {"weights": make_params(step), "training": {"step": jnp.array(step)}}
            checkpoints.save(step, trees, {"position": step}, best=step == best)


def same_bits(a: Any, b: Any) -> bool:
    def same(x: Any, y: Any) -> bool:
        x, y = np.asarray(x), np.asarray(y)
        return (x.shape, x.dtype, x.tobytes()) == (y.shape, y.dtype, y.tobytes())

    return jax.tree.all(jax.tree.map(same, a, b))


def edit_manifest(folder: Path, step: int, change: Any) -> None:
    path = folder / f"{step:08d}" / "manifest.json"
    values = json.loads(path.read_text())
    change(values)
    if values.pop("sha256", None):
        values["sha256"] = json_digest(values)
    path.write_text(json.dumps(values))


def test_state_returns_bit_for_bit(tmp_path: Path) -> None:
    state = make_state()
    training = state._replace(ema=None)
    progress = {"position": 7, "best_score": 0.1, "patience": 2, "note": None}
    folder = tmp_path / "run" / "checkpoints"
    with Checkpoints(folder, keep=3) as checkpoints:
        checkpoints.save(1000, {"weights": state.eval_params, "training": training}, progress)
    restored = checkpoint.restore(folder, 1000, "training", training)
    assert jax.tree.structure(restored) == jax.tree.structure(training)
    assert same_bits(restored, training)
    shardings = [jax.tree.map(lambda x: x.sharding, tree) for tree in (restored, training)]
    assert shardings[0] == shardings[1]
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), training)
    host = checkpoint.restore(folder, 1000, "training", like)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(host))
    assert same_bits(host, training)
    weights = checkpoint.restore(folder, 1000, "weights")
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(weights))
    assert same_bits(weights, state.ema)
    assert checkpoint.progress(folder, 1000) == progress


ODD = ["[a]*b?c]\\d{e,f}%20%s#~$HOME'\"`\nü:é", "[a]", "\udcff"]
"""Names of folders with characters that mean something to globs, shells, URLs or formats."""


@pytest.mark.parametrize("name", ODD)
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name / "checkpoints"
    save(folder, 1, 2)
    assert same_bits(checkpoint.restore(folder, 2, "weights"), make_params(2))
    folder = (tmp_path / name).rename(tmp_path / "plain") / "checkpoints"
    assert same_bits(checkpoint.restore(folder, 1, "weights"), make_params(1))


@pytest.mark.parametrize("damage", ["nothing merged", "one array missing"])
def test_what_cannot_be_read_back_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    save(tmp_path / "[a]", 1)
    if damage == "nothing merged":
        monkeypatch.setattr(checkpoint, "_for_orbax", Path.absolute)
    else:
        monkeypatch.setattr(checkpoint, "_stored_tree", lambda *_: {"x": jnp.ones(2)})
    with pytest.raises(OSError, match=r"saving checkpoint 2 in .*(no arrays|does not fit)"):
        save(tmp_path / "[a]", 2)
    monkeypatch.undo()
    assert checkpoint.steps(tmp_path / "[a]") == [1]


def test_arrays_may_be_donated_right_after_save(tmp_path: Path) -> None:
    increment = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        tree = increment({"big": jnp.zeros(1_000_000), "small": jnp.zeros((), jnp.int32)})
        for step in range(1, 4):
            checkpoints.save(step, {"weights": tree}, {})
            for _ in range(5):
                tree = increment(tree)
    for step, value in ((1, 1), (2, 6), (3, 11)):
        weights = checkpoint.restore(tmp_path, step, "weights")
        assert np.all(weights["big"] == value)
        assert weights["small"] == value


def test_newest_and_best_are_kept(place: AnyPath) -> None:
    assert checkpoint.steps(place) == []
    trees = {"weights": {"x": jnp.arange(4.0)}}
    with Checkpoints(place, keep=2) as checkpoints:
        assert checkpoint.best_step(place) is None
        for step in range(1, 7):
            checkpoints.save(step, trees, {"position": step}, best=step in (1, 3))
    assert checkpoint.steps(place) == [3, 5, 6]
    assert checkpoint.best_step(place) == 3
    assert sorted(path.name for path in place.iterdir()) == ["00000003", "00000005", "00000006"]
    assert checkpoint.progress(place, 5) == {"position": 5}
    assert same_bits(checkpoint.restore(place, 5, "weights", trees["weights"]), trees["weights"])


def test_the_newest_two_and_the_best_keep_the_state_of_training(
    place: AnyPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_: AnyPath) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:  # the manifest forgets the files before they go
        patch.setattr(manifest.files, "remove_folder", killed)
        save(place, 1, 2, 3, 4, best=2)
    assert (place / "00000001" / "training").exists()
    with pytest.raises(UserError, match="has no 'training'"):
        checkpoint.restore(place, 1, "training")
    save(place, 5, best=2)
    kept = [step for step in range(1, 6) if (place / f"{step:08d}" / "training").exists()]
    assert kept == [2, 4, 5]
    for step in (1, 3):
        assert same_bits(checkpoint.restore(place, step, "weights"), make_params(step))
    assert checkpoint.best_step(place) == 2


def test_a_step_saved_again_takes_the_place_of_the_older_one(tmp_path: Path) -> None:
    save(tmp_path, 3, 5, 6, best=3)
    tree = {"weights": {"x": jnp.ones(2)}}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(6, tree, {"again": True})
        checkpoints.wait()
        assert checkpoint.steps(tmp_path) == [3, 6]
        assert checkpoint.progress(tmp_path, 6) == {"again": True}
        checkpoints.save(4, tree, {})  # of a run continued from 3, since 6 is damaged
    assert checkpoint.steps(tmp_path) == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000003", "00000004"]


def test_a_damaged_manifest_does_not_stop_saving(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, best=1)
    (tmp_path / "00000002" / "manifest.json").write_text("{")
    save(tmp_path, 3)
    assert checkpoint.steps(tmp_path) == [1, 2, 3]
    save(tmp_path, 4, keep=1)
    assert checkpoint.steps(tmp_path) == [1, 4]  # the best stays


def test_an_old_checkpoint_that_cannot_be_deleted_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    save(tmp_path, 1, 2)
    monkeypatch.setattr(checkpoint, "_remove", denied)
    save(tmp_path, 3, keep=1)
    assert checkpoint.steps(tmp_path) == [1, 2, 3]
    assert "checkpoint 1 in " in caplog.text
    assert "is not deleted: [Errno 13] Permission denied" in caplog.text


@pytest.mark.usefixtures("here")
def test_works_in_a_notebook() -> None:
    """That is, where an event loop is running; and in a folder given by a relative path."""

    async def cell() -> None:
        save(Path("run"), 1)
        assert same_bits(checkpoint.restore(Path("run"), 1, "weights"), make_params())

    asyncio.run(cell())


def test_killed_process_leaves_whole_checkpoints(tmp_path: Path) -> None:
    """Killed before the manifest of the third is written."""
    save(tmp_path, 1, 2)
    code = """
import os, pathlib, sys
import jax.numpy as jnp
from transformer_jax.runs import checkpoint
with checkpoint.Checkpoints(pathlib.Path(sys.argv[1]), keep=2) as checkpoints:
    checkpoint.manifest.write = lambda *_: os.kill(os.getpid(), 9)
    checkpoints.save(3, {"weights": {"x": jnp.ones(3)}}, {})
"""
    command, root = [sys.executable, "-c", code, tmp_path], Path(checkpoint.__file__).parents[2]
    assert subprocess.run(command, cwd=root).returncode == -signal.SIGKILL
    assert checkpoint.steps(tmp_path) == [1, 2]
    assert same_bits(checkpoint.restore(tmp_path, 2, "weights"), make_params(2))
    assert len(list(tmp_path.iterdir())) == 3  # the unfinished one, too
    save(tmp_path, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{n:08d}" for n in (1, 2, 4)]


def test_other_devices(tmp_path: Path) -> None:
    """What one device saved is restored to four, and the other way round."""
    save(tmp_path, 1)
    mesh = make_mesh(devices=jax.devices()[:4])
    split = NamedSharding(mesh, PartitionSpec("data"))
    like = replicate(make_params(), mesh)
    like["encoder"]["odd"] = jax.device_put(like["encoder"]["odd"], split)
    tree = checkpoint.restore(tmp_path, 1, "weights", like)
    assert same_bits(tree, make_params())
    shardings = [jax.tree.map(lambda leaf: leaf.sharding, t) for t in (tree, like)]
    assert shardings[0] == shardings[1]
    negate = jax.jit(lambda tree: jax.tree.map(jnp.negative, tree), donate_argnums=0)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        tree = negate(tree)
        checkpoints.save(2, {"weights": tree}, {})
        negate(tree)
    one = checkpoint.restore(tmp_path, 2, "weights", make_params())
    assert same_bits(one, jax.tree.map(jnp.negative, make_params()))


def test_any_flipped_bit_is_noticed(place: AnyPath) -> None:
    save(place, 1)
    like = {"weights": make_params(), "training": {"step": jnp.array(1)}}
    files = files_below(place / "00000001")
    assert len(files) > 10
    for name, path in files.items():
        content = path.read_bytes()
        at = len(content) * 2 // 3
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        tree = "training" if name.startswith("training") else "weights"
        with pytest.raises(ValueError, match=r"checkpoint 1 in .*: ") as caught:
            checkpoint.restore(place, 1, tree, like[tree])
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
        path.write_bytes(content)
    assert same_bits(checkpoint.restore(place, 1, "weights"), make_params())


def test_missing_and_added_files_are_named(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    extra = tmp_path / "00000001" / "weights" / "extra"
    extra.write_text("")
    with pytest.raises(ValueError, match=r"weights/extra is not in manifest\.json"):
        checkpoint.restore(tmp_path, 1, "weights")
    checkpoint.progress(tmp_path, 1)  # is beside it, not in it
    (tmp_path / "00000002" / "progress.json").unlink()
    with pytest.raises(ValueError, match=r"checkpoint 2 .*: progress\.json is missing"):
        checkpoint.progress(tmp_path, 2)
    (tmp_path / "00000003" / "manifest.json").unlink()
    assert checkpoint.steps(tmp_path) == [1, 2]
    with pytest.raises(ValueError, match=r"checkpoint 3 .* half-written, without manifest\.json"):
        checkpoint.restore(tmp_path, 3, "weights")


def test_what_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint 1 in .* does not exist; there are: none"):
        checkpoint.restore(tmp_path / "missing", 1, "weights")
    save(tmp_path, 1, 12)
    with pytest.raises(ValueError, match=r"checkpoint 2 in .* does not exist; there are: 1, 12"):
        checkpoint.restore(tmp_path, 2, "weights")
    with pytest.raises(ValueError, match=r"has no 'ema'; it has: .*training, weights"):
        checkpoint.restore(tmp_path, 1, "ema")


def test_other_tree_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, 1)
    like = make_params()
    like["encoder"] = {"odd": jnp.zeros((2, 2)), "half": jnp.ones(5), "new": jnp.ones(1)}
    del like["decoder"]
    with pytest.raises(ValueError, match="weights does not fit") as caught:
        checkpoint.restore(tmp_path, 1, "weights", like)
    assert str(caught.value).split("fit: ")[1].split("; ") == [
        "decoder/layer_0/kernel: float32[3, 4] saved, nothing wanted",
        "encoder/half: bfloat16[5] saved, float32[5] wanted",
        "encoder/new: nothing saved, float32[1] wanted",
        "encoder/odd: float32[4] saved, float32[2, 2] wanted",
    ]
    many = like | {f"layer_{i}": jnp.ones(1) for i in range(900)}
    with pytest.raises(ValueError, match="weights does not fit") as caught:
        checkpoint.restore(tmp_path, 1, "weights", many)
    assert str(caught.value).endswith("; layer_0: nothing saved, float32[1] wanted; and 899 more")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "weights/../../x"])
def test_a_file_outside_the_checkpoint_is_none_of_it(tmp_path: Path, name: str) -> None:
    """Even one that is as the manifest says."""

    def outside(stored: dict[str, Any]) -> None:
        stored["files"][name] = stored["files"].pop("weights/_METADATA")

    save(tmp_path, 1)
    (tmp_path / "x").write_bytes((tmp_path / "00000001/weights/_METADATA").read_bytes())
    edit_manifest(tmp_path, 1, outside)
    with pytest.raises(ValueError, match=r"checkpoint 1 in .*: weights/\S* is (missing|not in)"):
        checkpoint.restore(tmp_path, 1, "weights")


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(step=2),
        lambda manifest: manifest.pop("best"),
        lambda manifest: manifest.update(files=[]),
        lambda manifest: manifest.pop("sha256"),
    ],
)
def test_odd_manifest_is_refused(tmp_path: Path, change: Any) -> None:
    save(tmp_path, 1)
    edit_manifest(tmp_path, 1, change)
    with pytest.raises(ValueError, match=r"checkpoint 1 in .*: manifest\.json is damaged"):
        checkpoint.progress(tmp_path, 1)


@pytest.mark.parametrize("other", [FORMAT - 1, FORMAT + 1])
def test_another_format_is_refused_by_name(tmp_path: Path, other: int) -> None:
    save(tmp_path, 1)
    edit_manifest(tmp_path, 1, lambda manifest: manifest.update(format=other, more=True))
    message = f"^checkpoint 1 in {tmp_path}: format {other}: this version reads {FORMAT}$"
    with pytest.raises(ValueError, match=message):
        checkpoint.restore(tmp_path, 1, "weights")


def test_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=47))
        with pytest.raises(OSError, match=r"no space left in .*: 48 bytes needed, 47 free"):
            checkpoints.save(2, {"weights": {"x": jnp.ones(12)}}, {})
        monkeypatch.undo()
        checkpoints.save(2, {"weights": {"x": jnp.ones(12)}}, {})
    assert checkpoint.steps(tmp_path) == [2]


def test_a_failed_save_is_one_line(place: AnyPath, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device\nno space")

    save(place, 1)
    with Checkpoints(place, keep=1) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "write", full)
            checkpoints.save(2, {"weights": make_params()}, {})
            with pytest.raises(OSError, match=r"^saving checkpoint 2 in .*: No space .* device$"):
                checkpoints.wait()
        assert checkpoint.steps(place) == [1]
        assert same_bits(checkpoint.restore(place, 1, "weights"), make_params())
        checkpoints.save(2, {"weights": make_params()}, {})
    again = "00000002" if isinstance(place, Path) else "00000002.new1"  # a write may go on there
    assert {name.split("/")[0] for name in files_below(place)} == {again}


def test_average_is_the_mean(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for step, value in ((1, 1.0), (2, 2.0**-24), (5, 2.0**-24)):  # lost in a float32 sum
            tree = {"x": {"y": jnp.full(3, value), "scalar": jnp.array(value)}}
            checkpoints.save(step, {"weights": tree}, {})
    mean = checkpoint.average(tmp_path, [1, 2, 5])["x"]
    for leaf, shape in ((mean["y"], (3,)), (mean["scalar"], ())):
        assert (type(leaf), leaf.dtype, leaf.shape) == (np.ndarray, np.float32, shape)
        assert np.all(leaf == np.float32((1 + 2.0**-23) / 3))
    assert np.all(checkpoint.average(tmp_path, [2])["x"]["y"] == np.float32(2.0**-24))
    with pytest.raises(ValueError, match="no checkpoints to average"):
        checkpoint.average(tmp_path, [])
    with pytest.raises(ValueError, match=r"checkpoint 3 in .* there are: 1, 2, 5"):
        checkpoint.average(tmp_path, [1, 3])


class Killed(BaseException):
    """Stands for the death of the process."""


CHANGES: list[tuple[Any, str]] = [(os, "mkdir"), (shutil, "rmtree")]
CHANGES += [(o, name) for o in (os, Path) for name in ("rename", "replace", "unlink", "rmdir")]
"""The functions with which a save changes the names in a folder."""


def save_again(folder: Path, patch: pytest.MonkeyPatch, at: int) -> int:
    """Saves step 2 once more, as the best one; the process dies before its `at`-th change of names
    from when the arrays are written. Returns the number of such changes."""
    changes, dead = 0, False

    def dying(change: Any) -> Any:
        def die_or_change(*arguments: Any, **options: Any) -> Any:
            nonlocal changes, dead
            changes += 1
            dead = dead or changes == at
            if dead:  # whatever else the code attempts, nothing changes any more
                raise Killed
            return change(*arguments, **options)

        return die_or_change

    checkpoints = Checkpoints(folder, keep=2)
    files_below = checkpoint.files.files_below

    def begin_to_die(new: Path) -> Any:
        for module, name in CHANGES:
            patch.setattr(module, name, dying(getattr(module, name)))
        patch.setattr(checkpoint.files, "files_below", files_below)
        return files_below(new)

    patch.setattr(checkpoint.files, "files_below", begin_to_die)
    checkpoints.save(2, {"weights": make_params(5)}, {"again": True}, best=True)
    with pytest.raises(Killed) if at else nullcontext(), checkpoints:
        pass
    patch.undo()
    return changes


@pytest.mark.slow
def test_a_step_saved_again_is_whole_wherever_the_process_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each renaming and deletion in turn. One of the two is there, and saving goes on."""
    save(tmp_path / "whole", 0, 1, 2)
    shutil.copytree(tmp_path / "whole", tmp_path / "counted")
    changes = save_again(tmp_path / "counted", monkeypatch, 0)
    assert changes > 10
    outcomes = set()
    for at in range(1, changes + 1):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "whole", folder)
        save_again(folder, monkeypatch, at)
        existing = checkpoint.steps(folder)
        assert existing[-2:] == [1, 2]
        again = checkpoint.progress(folder, 2) == {"again": True}
        outcomes.add(again)
        assert same_bits(checkpoint.restore(folder, 2, "weights"), make_params(5 if again else 2))
        assert same_bits(checkpoint.restore(folder, 1, "weights"), make_params(1))
        with Checkpoints(folder, keep=2) as checkpoints:  # the run goes on
            assert checkpoint.steps(folder)[-2:] == [1, 2]
            checkpoints.save(3, {"weights": make_params(3)}, {})
        assert checkpoint.steps(folder)[-2:] == [2, 3]
        assert len([*folder.iterdir()]) == len(checkpoint.steps(folder))  # and nothing unfinished
    assert outcomes == {False, True}
