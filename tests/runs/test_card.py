"""A card trains the same run again, or says what is not the same."""

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import Capture, error_line, flat

from transformer_jax.benchmark import results
from transformer_jax.cli.main import main
from transformer_jax.config import Config
from transformer_jax.data.order import VERSION
from transformer_jax.errors import UserError
from transformer_jax.runs import card, run
from transformer_jax.runs.run import Run

ROOT = Path(__file__).parents[2]
Edit = Callable[[dict[str, Any], dict[str, Any]], Any]
"""Changes a card and its provenance."""


@pytest.fixture
def path(finished: Run, tmp_path: Path) -> Path:
    """A result with the card of `finished`."""
    return results.write("x", "make x", {"bleu": 1.0, "card": card.make(finished)}, tmp_path)


def edited(path: Path, edit: Edit) -> Path:
    """The same result with another card."""
    values = json.loads(path.read_text("utf-8"))
    edit(values["card"], values["card"]["provenance"])
    path.write_text(json.dumps(values), "utf-8")
    return path


def results_with_cards() -> list[str]:
    """The result files of the project that hold cards, and their rows."""
    names = []
    for path in sorted((ROOT / results.FOLDER).glob("*.json")):
        stored = json.loads(path.read_text("utf-8"))
        names += [str(path)] * ("card" in stored)
        rows = stored.get("rows")
        rows = rows.items() if isinstance(rows, dict) else ()
        names += [f"{path}#{name}" for name, row in rows if "card" in row]
    return names


@pytest.mark.long
def test_it_trains_the_same_run_again(path: Path, finished: Run, tmp_path: Path) -> None:
    main(["train", f"--from-card={path}", f"--run={tmp_path / 'again'}"])
    again = run.load(tmp_path / "again")
    assert again.best_step() == finished.best_step()
    params, wanted = flat(again.params(12)), flat(finished.params(12))
    assert params.keys() == wanted.keys()
    assert all(np.array_equal(params[name], wanted[name]) for name in wanted)
    main(["train", f"--from-card={path}", f"--run={tmp_path / 'again'}"])  # which is to continue


@pytest.fixture
def moved(tiny_config: Config, tmp_path: Path) -> list[Path]:
    """Copies of the files that `finished` was trained on."""
    names = tiny_config.data.train[0].split(",")
    return [Path(shutil.copy(name, tmp_path / f"moved{Path(name).suffix}")) for name in names]


def test_files_elsewhere_must_be_the_same(
    path: Path, moved: list[Path], tiny_config: Config, tmp_path: Path, capsys: Capture
) -> None:
    there = "--config.data.train={},{}".format(*moved)
    arguments = ["train", f"--from-card={path}", f"--run={tmp_path / 's'}", there]
    moved[1].write_text("other\n" * 150, "utf-8")
    digests = card.load(str(path)).provenance["file_digests"]
    wanted = f"train.de: {digests[tiny_config.data.train[0].split(',')[1]]}"
    line = error_line(arguments, capsys)
    assert "is another text than that of card" in line
    assert wanted in line
    moved[0].unlink()
    line = error_line(arguments, capsys)
    assert "moved.en: No such file" in line
    assert wanted in line
    assert not (tmp_path / "s").exists()


def test_number_of_corpora(path: Path, tmp_path: Path, capsys: Capture) -> None:
    arguments = ["train", f"--from-card={path}", f"--run={tmp_path / 'r'}"]
    line = error_line([*arguments, "--config.data.dev=grammar", "grammar:test"], capsys)
    assert "data.dev: names 2 corpora; card" in line


def study(tmp_path: Path, finished: Run) -> Path:
    """The result of a study: a card in each row, one with another seed and from another time."""
    rows = {f"a_{i}": {"bleu": 1.0, "card": deepcopy(card.make(finished))} for i in (0, 1)}
    rows["a_1"]["card"]["config"]["train"]["seed"] = 1
    rows["a_1"]["card"]["provenance"]["versions"]["jax"] = "99.0"
    return results.write("study", "make study", {"rows": rows}, tmp_path)


@pytest.mark.long
def test_a_row_trains_with_files_elsewhere_and_other_versions_if_any_will_do(
    finished: Run, moved: list[Path], tmp_path: Path, capsys: Capture
) -> None:
    path, there = study(tmp_path / "study #1", finished), "--config.data.train={},{}".format(*moved)
    arguments = ["train", f"--from-card={path}#a_1", f"--run={tmp_path / 'r'}", there]
    line, here = error_line(arguments, capsys), run.versions()["jax"]
    assert f"other versions are installed (jax 99.0 -> {here}); install those, or give" in line
    assert not (tmp_path / "r").exists()
    main([*arguments, "--any-versions", "--config.train.steps=1"])
    trained = run.load(tmp_path / "r")
    assert trained.config.train.seed == 1
    assert trained.config.data.train == (",".join(map(str, moved)),)
    assert trained.provenance["versions"]["jax"] == here


def test_a_card_gives_the_start(path: Path, finished: Run, tmp_path: Path, capsys: Capture) -> None:
    other = f"--init-from={finished.folder}"
    line = error_line(["train", f"--from-card={path}", f"--run={tmp_path / 'r'}", other], capsys)
    assert f"card {path}: the run starts with random parameters; leave out {other}" in line
    assert not (tmp_path / "r").exists()
    start = {"run": "runs/first", "options": ["--new-vocabulary"]}
    card.require_start("c", start, "runs/first", ["--new-vocabulary"])
    with pytest.raises(UserError, match="of runs/first; give --init-from with --new-vocabulary"):
        card.require_start("c", start, "runs/first", ["--init-parts=encoder"])


@pytest.mark.parametrize("name", results_with_cards())
def test_the_committed_cards_can_be_read(name: str) -> None:
    assert card.load(name).provenance["versions"].keys() >= {"python", "jax", "flax"}


BAD: list[tuple[Edit, str]] = [
    (lambda card, _: card.update(format=2), "format=2: this version reads 1"),
    (lambda card, _: card.pop("provenance"), "provenance.order is missing or damaged"),
    (lambda _, about: about["data_digests"].pop("dev"), "data_digests.dev is missing or damaged"),
    (
        lambda card, _: card["config"]["execution"].update(kernel="a:b"),
        "'a:b': is not loaded from",
    ),
    (lambda _, about: about.update(init_from={"run": "first"}), "parameters of first; give --init"),
    (lambda _, about: about.update(order=VERSION + 1), f"order={VERSION + 1}: this version reads"),
    (lambda _, about: about["versions"].clear(), "versions are installed (python none -> "),
    (lambda _, about: about["file_digests"].update(x=1), "file_digests is missing or damaged"),
]


@pytest.mark.parametrize(("edit", "message"), BAD)
def test_bad_cards(path: Path, edit: Edit, message: str, tmp_path: Path, capsys: Capture) -> None:
    bad = edited(path, edit)
    line = error_line(["train", f"--from-card={bad}", f"--run={tmp_path / 'r'}"], capsys)
    assert f"card {bad}: " in line
    assert message in line
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("text", "row", "message"),
    [
        ("{", "", "not JSON"),
        ('{"bleu": 3}', "", 'is no result with a run card: "card" is missing'),
        ("[1]", "", 'is no result with a run card: "card" is missing'),
        ('{"rows": {"a": 3, "b": {}}}', "", "x.json: name one of its rows, as FILE#ROW: a, b"),
        ('{"rows": {"a": 3, "b": {}}}', "#c", "x.json#c: name one of its rows"),
    ],
)
def test_no_card(text: str, row: str, message: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "x.json").write_text(text)
    line = error_line(["train", f"--from-card={tmp_path / 'x.json'}{row}", "--run=r"], capsys)
    assert message in line
