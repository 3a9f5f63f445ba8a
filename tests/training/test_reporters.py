"""What the terminal shows, live and plain, and reporters of the user's own."""

import sys

import pytest
from common import Capture, Patch

from transformer_jax.training.reporters import Record, Terminal, describe

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
def test_the_terminal_shows_every_record(live: bool, monkeypatch: Patch, capsys: Capture) -> None:
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
