"""Back-translation from the command line: the run of words in reverse, from German to English."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from common import Capture, Patch, changed, error_line

from transformer_jax.cli.main import main
from transformer_jax.config import Config
from transformer_jax.decoding.translator import WINDOW, Translator
from transformer_jax.runs.run import Run
from transformer_jax.text.corpus import Corpus
from transformer_jax.training.trainer import train


@pytest.fixture(scope="module")
def reverse(tiny_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run from German to English that has learned some words."""
    folder = tmp_path_factory.mktemp("reverse")
    swapped = [
        tuple(",".join(reversed(name.split(","))) for name in names)
        for names in (tiny_config.data.train, tiny_config.data.dev)
    ]
    model: Any = dict.fromkeys(("dropout", "attention_dropout", "ffn_dropout"), 0.0)
    steps: Any = dict.fromkeys(("steps", "evaluate_every", "save_every"), 150)
    data = {"train": swapped[0], "dev": swapped[1]}
    return train(changed(tiny_config, model=model, data=data, train=steps), folder / "run")


@pytest.fixture
def command(reverse: Run, tiny_config: Config, tmp_path: Path) -> list[str]:
    """The command without --text, which is the last."""
    (pairs,) = tiny_config.data.train
    run, output = f"--run={reverse.folder}", f"--output={tmp_path / 'x.tsv'}"
    return ["back-translate", run, f"--pairs={pairs}", output, "--config.decode.min-length=1"]


def with_pairs(command: list[str], pairs: str) -> list[str]:
    """The command with other --pairs."""
    others = [argument for argument in command if not argument.startswith("--pairs")]
    return [*others, f"--pairs={pairs}"]


def test_it_writes_pairs(command: list[str], reverse: Run, tmp_path: Path, capsys: Capture) -> None:
    lines = ["rot grün", "", "  ", "klein\talt", "neu neu blau"]
    (tmp_path / "x.de").write_text("\n".join(lines) + "\n", "utf-8")
    main([*command, f"--text={tmp_path / 'x.de'}"])
    pairs = list(Corpus(f"{tmp_path / 'x.tsv'}").pairs())
    assert [target for _, target in pairs] == ["rot grün", "klein alt", "neu neu blau"]
    decode = replace(reverse.config.decode, min_length=1)
    sources = Translator.load(reverse.folder, decode=decode)([lines[0], *lines[3:]])
    assert [source for source, _ in pairs] == [source.text for source in sources]
    assert capsys.readouterr().err.endswith("3 pairs; 2 lines left out: blank, or so translated\n")
    same = [each.replace("x.tsv", "x.de") for each in command]
    assert "x.de: is also an input" in error_line([*same, f"--text={tmp_path / 'x.de'}"], capsys)


def test_another_direction(
    command: list[str], tiny_config: Config, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "x.en").write_text("red green\n", "utf-8")
    german, english = tiny_config.data.dev[0].split(",")[::-1]
    wrong = [*with_pairs(command, f"{german},{english}"), f"--text={tmp_path / 'x.en'}"]
    line = error_line(wrong, capsys)
    assert "--run: translates from the source to the target of --pairs (log probability -" in line
    assert not (tmp_path / "x.tsv").exists()


def test_another_language(
    command: list[str], tiny_config: Config, tmp_path: Path, capsys: Capture
) -> None:
    """The sources are right, and the letters are those of the language of the run."""
    english, german = (Path(name) for name in tiny_config.data.train[0].split(","))
    text = german.read_text("utf-8")
    (tmp_path / "x.fr").write_text(text.translate(str.maketrans("aeiourtn", "uoaeitrl")), "utf-8")
    wrong = with_pairs(command, f"{english},{tmp_path / 'x.fr'}")
    wrong += [f"--text={tmp_path / 'x.fr'}"]
    line = error_line(wrong, capsys)
    assert "--run: hardly uses the targets of --pairs to predict the sources (log prob" in line
    assert not (tmp_path / "x.tsv").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\n \n", "empty; must hold at least one line of text"),
        (
            "Старая книга лежит на столе.\n".encode(),
            "--text: 90% of its tokens are bytes or unknown in the source vocabulary",
        ),
        (b"rot\n" * WINDOW + b"r\xffot\n", f"line {WINDOW + 1}, byte 2: 0xff is not UTF-8"),
    ],
    ids=["blank", "language", "encoding"],
)
def test_bad_text_writes_nothing(
    text: bytes,
    message: str,
    command: list[str],
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Capture,
) -> None:
    def translate(*_: object, **__: object) -> list[str]:
        raise AssertionError("before it has found the mistake")

    monkeypatch.setattr(Translator, "translate", translate)
    (tmp_path / "x.de").write_bytes(text)
    assert message in error_line([*command, f"--text={tmp_path / 'x.de'}"], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["x.de"]
