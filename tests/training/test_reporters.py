"""What the terminal shows, live and plain, and reporters of the user's own."""

import importlib.util
import posixpath
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from transformer_jax.training.reporters import Record, Terminal, describe, scalars

USAGE = (Path(__file__).parents[2] / "docs" / "usage.md").read_text("utf-8")
EXAMPLES = dict(re.findall(r"```python\n# (report_\w+)\.py\n(.*?)```", USAGE, re.S))

RECORDS: list[Record] = [
    {"kind": "message", "step": 0, "text": "corpus: 3 pairs [all]"},
    {
        "kind": "train",
        "step": 40,
        "epoch": 1,
        "loss": 2.5,
        "tokens_per_s": 900.0,
        "padding": 0.1,
        "decoder/0/cross_attention/entropy": 1.25,
        "lr": 1e-3,
        "grad_norm": 1.5,
        "done": 0.4,
        "seconds_left": 75.0,
    },
    {
        "kind": "evaluation",
        "step": 40,
        "best": True,
        "sets": {"/a,dev": {"loss": 2.25, "bleu": 12.5}},
        "samples": [("a :smile: [b]", "x [red]y", "z")],
    },
]


def test_control_characters_do_not_reach_the_terminal() -> None:
    evaluation = RECORDS[2] | {"samples": [("a\x1b[2J", "b\x9b", "c\x07")], "sets": {"d\x1b": {}}}
    for record in (evaluation, {"kind": "message", "text": "corpus \x1b[2J"}):
        text = describe(record)
        assert not {"\x1b", "\x9b", "\x07"} & set(text)
        assert r"\x1b" in text


def test_metrics_of_the_same_name_are_told_apart() -> None:
    names = ("decoder/0/cross_attention/entropy", "decoder/1/cross_attention/entropy", "new")
    text = describe(RECORDS[1] | dict.fromkeys(names, 0.5))
    assert f"{names[0]} 0.5  {names[1]} 0.5  new 0.5" in text


@pytest.mark.parametrize("live", [True, False])
def test_the_terminal_shows_every_record(
    live: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Live, the metrics are drawn over themselves in two lines; elsewhere they are a line.

    Jupyter asks programs for colors, but shows their output as a file.
    """
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: live)
    with Terminal() as terminal:
        for record in RECORDS:
            terminal(record)
    shown = capsys.readouterr()
    assert shown.out == ""
    for text in (
        "corpus: 3 pairs [all]",
        "step     40  epoch   1  1m15s left" if live else "step     40  epoch   1  loss",
        "loss 2.500     900 tok/s  padding 10%  lr 1.00e-03  grad 1.50  entropy 1.25",
        "step     40  evaluation  (best so far)",
        "dev: loss 2.25  bleu 12.5",
        "source     a :smile: [b]",
        "output     x [red]y",
    ):
        assert text in shown.err
    clears, moves = "\x1b[2K", "\x1b[?25l"  # a line, and the cursor out of sight
    assert (clears in shown.err, moves in shown.err) == (live, live)
    assert live or len(shown.err.splitlines()) == 7


def stand_in(logged: list[tuple[int, list[Any]]]) -> Any:
    """Returns a module with the functions of both packages that the examples call."""

    def log(values: dict[str, Any], step: int) -> None:
        logged.append((step, [*values.values()]))

    def log_metrics(values: dict[str, float], step: int) -> None:
        for name in values:  # by the rules of MLflow
            assert re.fullmatch(r"[/\w.\- ]+", name)
            assert posixpath.normpath(name) == name.lstrip("/.")
        log(values, step)

    def init(**_: str) -> Any:
        return SimpleNamespace(log=log)

    table = {"Table": lambda columns, data: [columns, *data]}
    return SimpleNamespace(run=None, init=init, log_metrics=log_metrics, **table)


@pytest.mark.filterwarnings("ignore")  # which the packages may raise
@pytest.mark.parametrize(("name", "end"), [("wandb", "finish"), ("mlflow", "end_run")])
def test_the_examples_of_reporters_log_every_number(
    name: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the package, offline, if it is there, and with a module of the same functions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    space: dict[str, Any] = {}
    exec(compile(EXAMPLES[f"report_{name}"], name, "exec"), space)
    logged: list[tuple[int, list[Any]]] = []
    packages = [importlib.import_module(name)] if importlib.util.find_spec(name) else []
    for module in (*packages, stand_in(logged)):
        monkeypatch.setitem(sys.modules, name, module)
        for record in RECORDS:
            space["report"](record)
        getattr(module, end, lambda: None)()
    wanted: list[Any] = [(each["step"], [*scalars(each).values()]) for each in RECORDS[1:]]
    samples = [["source", "output", "reference"], ["a :smile: [b]", "x [red]y", "z"]]
    wanted[1][1].extend([samples] if name == "wandb" else [])
    assert logged == wanted
