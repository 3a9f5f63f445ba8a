"""A run of the first format must always load and translate the same."""

from collections.abc import Callable
from pathlib import Path

import pytest

from transformer_jax import checkpoint, run
from transformer_jax.config import DecodeConfig
from transformer_jax.run import Run
from transformer_jax.translate import Translator


@pytest.fixture
def rows(fixtures: Path) -> list[tuple[str, ...]]:
    """Source, greedy translation, and translation with four beams."""
    text = (fixtures / "run_translations.tsv").read_text("utf-8")
    return [tuple(line.split("\t")) for line in text.splitlines()]


@pytest.mark.parametrize(("column", "beam"), [(1, 1), (2, 4)])
def test_the_first_format_translates_as_ever(
    fixtures: Path, rows: list[tuple[str, ...]], column: int, beam: int
) -> None:
    translator = Translator.load(fixtures / "run", decode=DecodeConfig(beam=beam))
    assert translator([row[0] for row in rows]) == [row[column] for row in rows]


def test_the_first_format_stays_small_and_known(fixtures: Path) -> None:
    folder = fixtures / "run"
    assert sum(path.stat().st_size for path in folder.rglob("*")) <= 200_000
    loaded = run.load(folder)
    assert checkpoint.steps(loaded.checkpoints) == [2500]
    assert loaded.best_step() == 2500
    assert loaded.config.model.d_model == 24


def test_unchosen_checkpoints_are_named(fixtures: Path) -> None:
    with pytest.raises(ValueError, match="2500"):
        Translator.load(fixtures / "run", step=7)


def again(folder: Path, old: Run, save: Callable[[Path], None] = lambda _: None) -> Run:
    """A new run with the config and the tokenizer of `old`."""
    return run.create(folder, old.config, old.tokenizers, {}, save)


def test_a_run_is_made_in_the_current_folder(
    fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder stays the one it was: whoever stands in it sees the run."""
    old, folder = run.load(fixtures / "run"), tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    number = folder.stat().st_ino
    again(Path(), old)
    assert run.load(Path()).config == old.config
    assert folder.stat().st_ino == number
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_run_that_cannot_be_made_leaves_nothing(fixtures: Path, tmp_path: Path) -> None:
    old = run.load(fixtures / "run")

    def full(folder: Path) -> None:
        folder.mkdir()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        again(tmp_path / "r", old, full)
    assert not [*tmp_path.iterdir()]
    assert again(tmp_path / "r", old).folder == tmp_path / "r"
