"""A damaged run names the file and continues from an older checkpoint, or changes nothing."""

import json
import random
import shutil
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from common import Log, Patch
from training_process import assert_same

from tools.damage import Damage, contents, damage_campaign
from transformer_jax.errors import UserError
from transformer_jax.runs import checkpoint, manifest, run
from transformer_jax.runs.manifest import FORMAT
from transformer_jax.runs.run import Run
from transformer_jax.training.reporters import MetricsFile
from transformer_jax.training.resume import restored
from transformer_jax.training.setup import Setup, prepare
from transformer_jax.training.trainer import train

EXPECTED = {"stepped back", "refused", "named"}


@pytest.fixture(scope="module")
def setup(finished: Run) -> Setup:
    """What training needs to continue `finished`."""
    return prepare(finished.config, finished.tokenizers)


def unexpected(found: dict[str, Any]) -> list[dict[str, str]]:
    """The damages that were not named; an older config.json of the same run is not known as such,
    nor is another number in the log."""

    def harmless(row: dict[str, str]) -> bool:
        older = row["file"] == "config.json" and row["kind"] == "replaced by an older one"
        return row["outcome"] == "harmless" and (older or row["file"] == "metrics.jsonl")

    rows = found["damaged_files"]
    return [row for row in rows if row["outcome"] not in EXPECTED and not harmless(row)]


def test_damage_is_named(finished: Run) -> None:
    sample = partial(random.Random(0).sample, k=5)
    found = damage_campaign(Path(str(finished.folder)), sample)
    assert found["silent_loads"] == 0
    assert unexpected(found) == []
    assert len(found["damaged_files"]) == 5


@pytest.mark.slow
def test_damage_to_every_file_and_of_every_kind_is_named(finished: Run) -> None:
    """Each file is damaged in one way; `make measure NAME=faults` damages each in every way."""

    def one_for_each_file(damages: list[Damage]) -> list[Damage]:
        by_file = [list(group) for _, group in groupby(damages, attrgetter("file"))]
        return [group[index % len(group)] for index, group in enumerate(by_file)]

    found = damage_campaign(Path(str(finished.folder)), one_for_each_file)
    assert found["silent_loads"] == 0
    assert unexpected(found) == []
    files = {row["file"] for row in found["damaged_files"] if ": " not in row["file"]}
    assert files == contents(Path(str(finished.folder))).keys()
    assert len({row["kind"] for row in found["damaged_files"]}) == 8


def test_without_digests_damage_would_be_silent(finished: Run, monkeypatch: Patch) -> None:
    def older_progress(damages: list[Damage]) -> list[Damage]:
        older = [each for each in damages if each.kind == "replaced by an older one"]
        return [each for each in older if each.file.endswith("progress.json")]

    monkeypatch.setattr(manifest, "verify", lambda path, part: manifest.read(path))
    assert damage_campaign(Path(str(finished.folder)), older_progress)["silent_loads"] > 0


def test_an_edited_config_is_refused_until_its_digest_is_deleted(copied: Run) -> None:
    path = copied.folder / "config.json"
    text = path.read_text("utf-8")
    path.write_text(text.replace('"learning_rate": 0.01', '"learning_rate": 0.02'), "utf-8")
    with pytest.raises(UserError, match=f"{path}: is damaged or was edited: .* delete the line"):
        run.load(copied.folder)
    with pytest.raises(UserError, match="is damaged or was edited"):
        run.load_config(copied.folder)
    lines = path.read_text("utf-8").splitlines()
    path.write_text("\n".join(line for line in lines if '"sha256"' not in line), "utf-8")
    loaded = run.load(copied.folder)
    assert loaded.config.optimizer.learning_rate == 0.02
    run.update(loaded, loaded.config)
    assert "sha256" in json.loads(path.read_text("utf-8"))
    run.load(copied.folder)


def test_a_checkpoint_of_another_format_is_not_stepped_over(copied: Run, setup: Setup) -> None:
    path = copied.checkpoints / "00000012" / "manifest.json"
    values = json.loads(path.read_text("utf-8"))
    path.write_bytes(json.dumps(values | {"format": FORMAT + 1}).encode())
    with pytest.raises(UserError, match=f"format {FORMAT + 1}: this version reads {FORMAT}"):
        restored(copied, setup)


@pytest.mark.parametrize("step", [8, 12])
def test_a_lost_manifest_is_named_whichever_checkpoint_it_is_of(
    step: int, copied: Run, setup: Setup, caplog: Log
) -> None:
    """The checkpoint may be the best one. It is kept, since its other files are good."""
    lost = copied.checkpoints / f"{step:08d}"
    (lost / "manifest.json").unlink()
    named = f"checkpoint {step} in .*: manifest.json is missing; restore it, delete {lost}, or name"
    for read in (copied.best_step, copied.newest_steps, copied.params):
        with pytest.raises(UserError, match=named):
            read()
    assert restored(copied, setup) is not None
    (said,) = caplog.messages
    assert "manifest.json is missing" in said
    assert said.endswith("continuing from the checkpoint before it" if step == 12 else "as it is")
    with checkpoint.Checkpoints(copied.checkpoints, keep=3):
        pass
    assert (lost / "progress.json").exists()


def test_a_run_that_has_lost_its_checkpoints_says_that_it_starts_anew(
    copied: Run, setup: Setup, caplog: Log
) -> None:
    shutil.rmtree(str(copied.checkpoints))
    assert restored(copied, setup) is None
    (said,) = caplog.messages
    assert f"run {copied.folder}: has no checkpoint, although it was trained to step 12" in said
    assert said.endswith("starting from the beginning")


def test_lost_records_are_warned_of(tmp_path: Path, caplog: Log) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 2}\n{"step" 4}\n{"step": 6}\n{"step": 8}\n')
    MetricsFile(path).cut(7, 7, expected=6)
    assert path.read_bytes() == b'{"step": 2}\n{"step": 6}\n'
    (said,) = caplog.messages
    assert said.startswith(f"{path}: line 2: not JSON")
    caplog.clear()
    MetricsFile(path).cut(10, 10, expected=10)
    assert caplog.messages == [f"{path}: records of steps 7 to 10 are lost"]
    caplog.clear()
    path.unlink()
    MetricsFile(path).cut(1, 1)
    assert caplog.messages == []
    MetricsFile(path).cut(10, 10, expected=10)
    assert caplog.messages == [f"{path}: records of steps 1 to 10 are lost"]


@pytest.mark.slow
def test_a_run_that_has_stepped_back_ends_with_the_same_bits(
    finished: Run, copied: Run, caplog: Log
) -> None:
    name = "weights/manifest.ocdbt"
    (copied.checkpoints / "00000012" / name).write_bytes(b"damaged")
    made = train(finished.config, copied.folder)
    assert f"checkpoint 12 in {copied.checkpoints}: {name} is damaged" in caplog.text
    assert made.best_step() == finished.best_step()
    assert_same(made, finished)
