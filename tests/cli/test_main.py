"""The command line: what a user types, sees, and reads when something is wrong."""

import gzip
import importlib
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
from common import ONE_DEVICE, Capture, Log, Patch, changed, error_line, json_lines, printed
from object_store import Bucket

from tools.common import config_file as write_config
from transformer_jax.allocator import ALLOCATOR
from transformer_jax.attention import kinds, scores
from transformer_jax.cli.common import text_output
from transformer_jax.cli.main import main
from transformer_jax.config import Config, DecodeConfig, from_json
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.files import AnyPath, files_below, find_path
from transformer_jax.runs import checkpoint, run
from transformer_jax.runs.run import Run
from transformer_jax.text.corpus import Corpus
from transformer_jax.training import planning, trainer
from transformer_jax.training.reporters import read_metrics

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config_file(tiny_config: Config, tmp_path: Path) -> Path:
    """`tiny_config` as a user would write it."""
    return write_config(tiny_config, tmp_path / "config.py")


def test_a_message_that_is_wrapped_is_read_whole(capsys: Capture, monkeypatch: Patch) -> None:
    positions = "--config.model.positions=rotari"
    for width in range(40, 46):  # a message is wrapped, in another place at each
        monkeypatch.setenv("COLUMNS", str(width))
        near = error_line(["inspect", "--config=configs/quickstart.py", positions], capsys)
        assert near.endswith(f"argument '{positions.partition('=')[0]}'; did you mean rotary?")


def test_a_defect_keeps_its_traceback(monkeypatch: Patch, finished: Run) -> None:
    """Only errors of users become one line: a plain ValueError is a defect."""

    def broken(*_: Any) -> None:
        raise ValueError("shapes do not match")

    monkeypatch.setattr(run, "average", broken)
    with pytest.raises(ValueError, match=r"^shapes do not match$"):
        main(["average", f"--run={finished.folder}", "--out=x"])


def test_no_memory_is_one_line(monkeypatch: Patch, finished: Run, capsys: Capture) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nMore.")

    monkeypatch.setattr(run, "average", full)
    line = error_line(["average", f"--run={finished.folder}", "--out=x"], capsys)
    assert line.endswith("Out of memory allocating 9 bytes.; needs smaller batches")


def test_text_is_utf8_on_any_terminal(finished: Run, monkeypatch: Patch) -> None:
    """Such as one with PYTHONIOENCODING=ascii."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    main(["evaluate", f"--run={finished.folder}", "--beam=1", "--show=20"])
    sys.stdout.flush()
    assert "grün" in written.getvalue().decode("utf-8")


def test_training_from_the_command_line(config_file: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "run"
    command = ["train", f"--config={config_file}", "--run", str(folder), "--config.train.steps=4"]
    main([*command, "--profile=1"])
    assert len([*folder.glob("profile/**/*.xplane.pb")]) == 1
    said = capsys.readouterr().err
    assert "150 pairs; left out: 0 with an empty side, 0 too long" in said
    assert "training text: 150 pairs read, of which" in said
    assert "reached train.steps=4" in said
    main(command)
    assert "step 4: reached train.steps=4" in capsys.readouterr().err
    assert "model.d_ff: 32 -> 64" in error_line([*command, "--config.model.d_ff=64"], capsys)
    error = error_line([*command, "--new"], capsys)
    assert "--new needs a folder that is missing or empty" in error
    assert checkpoint.steps(folder / "checkpoints") == [4]


OWN = """
CALLS = []

def falling(sources, outputs, references):
    CALLS.append(outputs)
    return 100 - len(CALLS)

def report(record):
    raise OSError("no network")
"""
"""A module with a user's metric, whose first value is the best, and a reporter, which fails."""


@pytest.mark.long
@pytest.mark.usefixtures("here")
def test_training_with_a_metric_and_a_reporter_of_ones_own(
    tiny_config: Config, capsys: Capture, caplog: Log
) -> None:
    """They are found in the current folder. The run continues with this metric only."""
    Path("own.py").write_text(OWN)
    every = {"evaluate_every": 1, "save_every": 1, "steps": 2}
    write_config(changed(tiny_config, train=every), Path("c.py"))
    metric = "--metric=own:falling"
    main(["train", "--config=c.py", "--run=r", metric, "--reporter=own:report"])
    (warning,) = caplog.messages
    assert "--reporter 'own:report': OSError: no network; training goes on" in warning
    assert "falling 97" in capsys.readouterr().err
    assert len(importlib.import_module("own").CALLS) == 3  # the first call is a check
    again = ["train", "--run=r", "--config.train.steps=3"]
    needs = "one of bleu, chrf, loss; a metric of your own needs --metric MODULE:falling"
    assert f"train.best='falling': must be {needs}" in error_line(again, capsys)
    other = [*again, "--metric=math:fsum"]
    assert "train.best: 'falling' -> 'fsum'" in error_line(other, capsys)
    main([*again, metric])
    records = [record for record in read_metrics(Path("r/metrics.jsonl")) if "sets" in record]
    (name,) = tiny_config.data.dev
    assert [record["sets"][name]["falling"] for record in records] == [98, 97, 95]
    assert [record["best"] for record in records] == [True, False, False]


@pytest.mark.parametrize("chosen", [False, True])
def test_tensorboard_stays_with_the_run(
    chosen: bool, copied: Run, monkeypatch: Patch, capsys: Capture
) -> None:
    folder = copied.folder
    if chosen:
        (folder / "tensorboard").mkdir()
    kinds: list[str] = []

    def train(*_: Any, reporters: list[Any], **__: Any) -> None:
        kinds.extend(type(reporter).__name__ for reporter in reporters)

    monkeypatch.setattr(trainer, "train", train)
    main(["train", f"--run={folder}"])
    assert kinds == ["Terminal", *["TensorBoard"] * chosen]
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    if chosen:
        needs = "needs tensorboardX; pip install 'transformer-jax[tensorboard]', or rename"
        assert f"{needs} {folder}" in error_line(["train", f"--run={folder}"], capsys)


@pytest.mark.long
def test_train_py_continues_and_keeps_its_programs(config_file: Path, tmp_path: Path) -> None:
    """In processes of their own, at whose end TensorBoard's events are written too."""
    folder, cache = tmp_path / "run", tmp_path / "cache"
    kept = {"XDG_CACHE_HOME": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def said(steps: int) -> str:
        command = [sys.executable, "train.py", f"--config={config_file}", f"--run={folder}"]
        return subprocess.run(
            [*command, "--tensorboard", f"--config.train.steps={steps}"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ | ONE_DEVICE | kept,
            check=True,
        ).stderr

    assert "step 4: reached train.steps=4" in said(4)
    again = said(6)
    assert f"continuing run {folder} at step 4" in again
    assert "step 6: reached train.steps=6" in again
    assert checkpoint.steps(folder / "checkpoints") == [4, 6]
    assert any((cache / "transformer_jax" / "programs").iterdir())
    files = {"config.json", "tokenizer.model", "metrics.jsonl", "checkpoints", "tensorboard"}
    assert {path.name for path in folder.iterdir()} == files
    events = b"".join(path.read_bytes() for path in (folder / "tensorboard").iterdir())
    assert all(tag in events for tag in (b"loss", b"tokens_per_s", b"grad_norm", b"/bleu"))


def test_a_run_to_start_from_gives_its_config(
    finished: Run, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    configs: list[Config] = []
    monkeypatch.setattr(trainer, "train", lambda config, *_, **__: configs.append(config))
    command = ["train", f"--run={tmp_path / 'r'}", f"--init-from={finished.folder}"]
    main([*command, "--config.train.steps=3"])
    wanted = replace(finished.config, train=replace(finished.config.train, steps=3))
    assert configs == [wanted]
    main(["train", f"--run={finished.folder}", f"--init-from={tmp_path / 'none'}"])
    assert configs[1] == finished.config  # of the run to continue
    command = ["inspect", f"--run={finished.folder}", "--config.tokenizer.vocabulary=4000"]
    assert "decide tokenizer.vocabulary=4000: must be" in error_line(command, capsys)


def test_translation_is_a_line_for_a_line_in_order(
    finished: Run, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    lines = ["red old", "", "blue blue green", "  ", "new"]
    translator = Translator.load(finished.folder)
    wanted = translator(lines)
    assert wanted[1] == wanted[3] == ""
    assert translator(lines[::-1]) == wanted[::-1]
    with gzip.open(tmp_path / "in.gz", "wt", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    run_option = f"--run={finished.folder}"
    out = tmp_path / "out.txt"
    main(["translate", run_option, f"--input={tmp_path / 'in.gz'}", f"--output={out}"])
    assert out.read_text("utf-8").split("\n") == [*wanted, ""]
    source = tmp_path / "in.txt"
    source.write_text("".join(f"{line}\n" for line in lines))
    with source.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        main(["translate", run_option])
    assert capsys.readouterr().out == "".join(f"{line}\n" for line in wanted)


def test_translations_as_json(finished: Run, tmp_path: Path, capsys: Capture) -> None:
    """A line for a line, with scores, tokens and the n best; the search is the one asked for."""
    source, prefix = tmp_path / "source", tmp_path / "prefix"
    source.write_text("red old\n\nblue new green\n")
    prefix.write_text("\n\nneu\n")
    command = ["translate", f"--run={finished.folder}", f"--input={source}", "--json"]
    options = ["--beam=3", "--n-best=2", "--penalty=none", f"--prefix={prefix}"]
    lines = json_lines([*command, *options], capsys)
    assert [line["line"] for line in lines] == [1, 2, 3]
    assert lines[1]["text"] == ""
    assert lines[2]["text"].startswith("neu")
    for line in (lines[0], lines[2]):
        assert len(line["n_best"]) == 2
        for each in line["n_best"]:
            assert each["score"] == each["log_prob"]
            assert "".join(each["tokens"]).replace("</s>", "").replace("▁", " ").strip()
    sampled = json_lines([*command, "--config.decode.sample=True"], capsys)
    assert all("n_best" not in line for line in sampled)
    message = "decode.n_best=2: needs --json; plain output has a line for each"
    assert message in error_line([*command[:-1], "--n-best=2"], capsys)
    prefix.write_text("neu\n")
    assert "line 2: has no prefix" in error_line([*command, f"--prefix={prefix}"], capsys)
    prefix.write_text("\n" * 4)
    whole = [*command, f"--prefix={prefix}", f"--output={tmp_path / 'out'}"]
    assert "prefix: has more lines than the input" in error_line(whole, capsys)
    assert not (tmp_path / "out").exists()


def test_options_of_the_search_together(finished: Run, tmp_path: Path, capsys: Capture) -> None:
    """Each alone would not fit the run's beam of 4, or of the other option."""
    (tmp_path / "source").write_text("red\n")
    command = ["translate", f"--run={finished.folder}", f"--input={tmp_path / 'source'}", "--json"]
    for options in (["--n-best=5", "--beam=5"], ["--beam=1", "--config.decode.n-best=1"]):
        assert json_lines([*command, *options], capsys)[0]["line"] == 1
    assert "n_best=5: must be at most" in error_line([*command, "--n-best=5"], capsys)
    command = ["evaluate", f"--run={finished.folder}", "--config.decode.n-best=4", "--beam=1,2"]
    assert len(printed(command, capsys).splitlines()) == 6


def test_an_interrupted_file_is_continued(
    finished: Run, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """After the whole lines that are there, if the text, the run and the search are the same.

    Scores are rounded otherwise in batches of other lines.
    """

    def without_scores(text: str) -> str:
        return re.sub(r"-\d+\.\d+", "", text)

    lines = ["red old", "", "blue", "new", "green"]
    for name, text in (("in", lines), ("prefix", ["", "", "neu", "", "rot"])):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in text))
    out, seen = tmp_path / "out", []
    command = ["translate", f"--run={finished.folder}", f"--input={tmp_path / 'in'}", "--json"]
    command += [f"--prefix={tmp_path / 'prefix'}", "--config.decode.sample=True"]
    whole = without_scores(printed(command, capsys))
    assert whole.count('"score": ,') == 4
    translate = Translator.translate

    def interrupted(self: Translator, texts: list[str], *rest: Any, **options: Any) -> Any:
        seen.append((options["first"], list(texts)))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return translate(self, texts, *rest, **options)

    monkeypatch.setattr(Translator, "translate", interrupted)
    monkeypatch.setattr("transformer_jax.decoding.translator.WINDOW", 2)
    with pytest.raises(SystemExit) as stop:
        main([*command, f"--output={out}"])
    assert stop.value.code == 130
    (part,) = tmp_path.glob("*.part")
    assert without_scores(part.read_text()) == "".join(whole.splitlines(keepends=True)[:2])
    with part.open("a") as file:
        file.write('{"line": 3, "te')
    main([*command, f"--output={out}", "--config.decode.seed=1"])  # another search
    assert without_scores(out.read_text()) != whole
    assert [first for first, _ in seen[2:]] == [1, 3, 5]
    main([*command, f"--output={out}"])
    assert without_scores(out.read_text()) == whole
    assert [first for first, _ in seen[5:]] == [3, 5]
    assert f"{part}: continues after 2 lines" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"in", "prefix", "out"}


def test_one_process_writes_a_part(tmp_path: Path) -> None:
    with text_output(str(tmp_path / "out"), lambda: 1) as (write, count):
        assert count == 0
        write("one")
        message = "another process writes to it"
        with pytest.raises(UserError, match=message), text_output(str(tmp_path / "out"), lambda: 1):
            pass
        write(None)
    assert (tmp_path / "out").read_text() == "one\n"


def test_lines_before_a_damaged_line(finished: Run, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "in").write_bytes(b"red old\nblue\nt\xe4\nnew\n")
    with pytest.raises(SystemExit):
        main(["translate", f"--run={finished.folder}", f"--input={tmp_path / 'in'}", "--beam=1"])
    out, error = capsys.readouterr()
    greedy = Translator.load(finished.folder, decode=DecodeConfig(beam=1))
    assert out.splitlines() == greedy(["red old", "blue"])
    assert "line 3, byte 2: 0xe4 is not UTF-8" in error


def piped(finished: Run, *options: str) -> "subprocess.Popen[str]":
    """A process that translates what it is given."""
    program = "from transformer_jax.cli.main import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, "translate", f"--run={finished.folder}", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
@pytest.mark.parametrize(("line", "status"), [("", 130), ("rot " * 300, 2)])
def test_translation_may_end_while_it_waits_for_lines(
    finished: Run, tmp_path: Path, line: str, status: int
) -> None:
    """By an interrupt, or by an error."""
    prefixes = tmp_path / "prefixes"
    prefixes.write_text(f"\n{line}\n")
    with piped(finished, f"--prefix={prefixes}") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(2 if line else 1):
            process.stdin.write("red old\n")
            process.stdin.flush()
        assert process.stdout.readline() or line
        if not line:
            process.send_signal(signal.SIGINT)
        assert process.wait(100) == status
        assert process.stderr is not None
        error = process.stderr.read()
    assert error.count("\n") == (1 if line else 0), error


@pytest.mark.long
@pytest.mark.parametrize(
    "set_up", ["main.end_at_interrupt()", "sys.unraisablehook = main.end_if_interrupted"]
)
def test_an_interrupt_that_python_loses_ends_a_process(set_up: str) -> None:
    """In a callback of a weak reference, as JAX has them, while a thread runs."""
    program = f"""if True:
        import os, signal, sys, threading, time, weakref
        from transformer_jax import files
        from transformer_jax.cli import main
        {set_up}
        files.temporaries.callback(print, "removed", flush=True)
        threading.Thread(target=time.sleep, args=(60,)).start()
        watched = threading.Lock()
        interrupt = weakref.ref(watched, lambda _: os.kill(os.getpid(), signal.SIGINT))
        del watched
        time.sleep(60)
    """
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, timeout=50, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (130, "removed\n")


@pytest.mark.long
def test_a_pipe_is_translated_as_lines_arrive_and_may_be_closed(finished: Run) -> None:
    with piped(finished) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in ("red old", "", "blue"):
            process.stdin.write(line + "\n")
            process.stdin.flush()
            wanted = Translator.load(finished.folder)([line])[0]
            assert process.stdout.readline() == wanted + "\n"
        process.stdout.close()
        _, error = process.communicate("red\n" * 10, timeout=100)
    assert process.returncode == 141
    assert error == ""


def test_a_long_line_is_translated_in_parts_or_cut_with_a_warning(
    finished: Run, tmp_path: Path, caplog: Log, capsys: Capture
) -> None:
    (tmp_path / "input").write_text(f"red\n{'red old. ' * 20}\n")
    command = ["translate", f"--run={finished.folder}", f"--input={tmp_path / 'input'}", "--json"]
    first, second = json_lines([*command, "--n-best=2", "--beam=2", "--align", "all"], capsys)
    assert "parts" not in first
    assert [part["source"] for part in second["parts"]] == ["red old."] * 20
    assert " ".join(part["text"] for part in second["parts"]) == second["text"]
    total = sum(part["log_prob"] for part in second["parts"])
    assert second["log_prob"] == pytest.approx(total)
    assert all(part["alignment"] for part in second["parts"])
    assert "cut from" not in caplog.text
    assert "parts" not in printed([*command, "--truncate"], capsys)
    assert "line 2: cut from" in caplog.text
    assert "model.max_length=32" in caplog.text


@pytest.mark.parametrize("command", ["translate --input=X", "evaluate --data X,X"])
def test_translations_that_stop_at_their_greatest_length_are_counted(
    command: str, finished: Run, tmp_path: Path, caplog: Log
) -> None:
    (tmp_path / "x").write_text("red old new\n\nblue\n")
    options = command.replace("X", str(tmp_path / "x")).split()
    main([*options, f"--run={finished.folder}", "--beam=1", "--config.decode.max_length=1"])
    assert re.search("x: 2 of 3 translations stop at their greatest length", caplog.text)


@pytest.mark.parametrize(
    "command",
    [
        "translate --input=X",
        "translate --input=/dev/null --prefix=X",
        "evaluate --data X,X",
        "evaluate --baseline=X",
    ],
)
def test_no_input_is_replaced(command: str, finished: Run, tmp_path: Path, capsys: Capture) -> None:
    text = "".join(f"{side}\n" for _, side in Corpus(finished.config.data.dev[0]).pairs())
    (tmp_path / "x").write_text(text)
    (tmp_path / "link").symlink_to(tmp_path / "x")
    options = command.replace("X", str(tmp_path / "x")).split()
    output = f"--output={tmp_path / 'link'}"
    line = error_line([*options, f"--run={finished.folder}", output], capsys)
    assert line.endswith(f"{output}: is also an input; name another file")
    assert (tmp_path / "x").read_text() == text


def test_evaluation_prints_scores_and_signatures(finished: Run, capsys: Capture) -> None:
    command = ["evaluate", f"--run={finished.folder}", "--beam=1"]
    text = printed([*command, "--language=de", "--show=2"], capsys)
    assert text.count("reference ") == 2
    assert re.findall(r"^line (\d), chrF [\d.]+\nsource ", text, re.M) == ["1", "2"]
    assert f"{finished.config.data.dev[0]}, step {finished.best_step()}: bleu " in text
    assert "tok:13a" in text
    assert "bleu_lower_tokenized" in text
    (scores,) = json_lines([*command, "--json"], capsys)
    assert (scores["search"]["beam"], scores["steps"]) == (1, [finished.best_step()])
    assert {"bleu", "chrf", "exact", "loss", "perplexity", "signatures"} <= scores.keys()


@pytest.mark.long
def test_evaluation_takes_a_tokenizer_and_further_references(
    finished: Run, tmp_path: Path, capsys: Capture
) -> None:
    target = finished.config.data.dev[0].split(",")[1]
    short = tmp_path / "short"
    short.write_text("x\n")
    command = ["evaluate", f"--run={finished.folder}", "--beam=1", "--json"]

    def scores(*more: str) -> dict[str, Any]:
        return json_lines([*command, *more], capsys)[0]

    one, several = scores(), scores("--references", target, target, "--tokenize", "char")
    assert several["signatures"]["bleu"].startswith("nrefs:3|")
    assert "|tok:char|" in several["signatures"]["bleu"]
    assert (one["chrf"], one["exact"]) == (several["chrf"], several["exact"])
    assert "'xx' for argument '--config.train.tokenize'; known: 13a, intl, zh, char, none" in (
        error_line([*command, "--tokenize=xx"], capsys)
    )
    said = f"--references={short}: has 1 lines; must have "
    assert said in error_line([*command, f"--references={short}"], capsys)


def test_evaluation_writes_translations_and_shows_the_worst(
    finished: Run, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """On a terminal, with a bar on standard error; standard output holds the scores alone."""
    dev = Corpus(finished.config.data.dev[0])
    sources, references = zip(*dev.pairs(), strict=True)
    outputs = Translator.load(finished.folder, decode=DecodeConfig(beam=1))(list(sources))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    command = ["evaluate", f"--run={finished.folder}", "--beam=1", f"--output={tmp_path / 'out'}"]
    main([*command, "--worst=2"])
    shown = capsys.readouterr()
    assert (tmp_path / "out").read_text("utf-8") == "".join(f"{line}\n" for line in outputs)
    assert f"/{len(sources)}" in shown.err
    assert "\x1b" not in shown.out
    for kind in ("worst", "best"):
        (number, score), *_ = re.findall(rf"^{kind} line (\d+), chrF ([\d.]+)$", shown.out, re.M)
        line = int(number) - 1
        assert f"{kind} source     {sources[line]}\n" in shown.out
        chrf = sacrebleu.sentence_chrf(outputs[line], [references[line]]).score
        assert float(score) == pytest.approx(chrf, abs=0.05)
    monkeypatch.undo()
    (tmp_path / "out").unlink()
    for more in (["--beam=1,2"], ["--data", dev.name, dev.name]):
        error = error_line([*command[:2], command[3], *more], capsys)
        assert f"--output={tmp_path / 'out'}: needs one corpus and search, not 2" in error
    error = error_line([*command[:3], f"--output={tmp_path / 'no' / 'out'}"], capsys)
    assert f"there is no folder {tmp_path / 'no'}" in error
    assert not [*tmp_path.iterdir()]


@pytest.mark.long
def test_searches_are_compared_in_one_table_and_with_a_baseline(
    finished: Run, tmp_path: Path, capsys: Capture
) -> None:
    data = finished.config.data.dev[0]
    count = len(Path(data.split(",")[0]).read_text().splitlines())
    baseline = tmp_path / "baseline"
    command = ["evaluate", f"--run={finished.folder}"]
    table = printed([*command, "--beam=1,3", "--alpha=0.6,1.0"], capsys)
    rows = [line.split() for line in table.splitlines()[-5:]]
    assert rows[0] == ["beam", "alpha", "bleu", "chrf", "length_ratio", "sentences_per_s"]
    assert [row[:2] for row in rows[1:]] == [["1", "0.6"], ["1", "1"], ["3", "0.6"], ["3", "1"]]
    baseline.write_text("x\n" * count)
    scores = json_lines([*command, "--beam=1", f"--baseline={baseline}", "--json"], capsys)
    compared = scores[0]["baseline"]
    for name in ("bleu", "chrf"):
        assert compared[name]["baseline"]["score"] < compared[name]["ours"]["score"]
        assert 0 <= compared[name]["p_value"] <= 1
    assert compared["chrf"]["p_value"] < 0.05
    text = printed([*command, "--beam=1", f"--baseline={baseline}", "--worst=1"], capsys)
    assert text.count("worst output") == text.count("best output") == 1
    assert re.search(r"chrf [\d.]+ \(± [\d.]+\), baseline [\d.]+ .* p = 0\.0", text)
    baseline.write_text("rot\n")
    message = f"--baseline={baseline}: has 1 lines; must have {count}, one for each pair of "
    assert message in error_line([*command, f"--baseline={baseline}"], capsys)
    assert "--beam=1,x: must be numbers" in error_line([*command, "--beam=1,x"], capsys)


@pytest.mark.long
def test_pairs_are_scored_and_aligned(finished: Run, tmp_path: Path, capsys: Capture) -> None:
    source, target, phrases = (tmp_path / name for name in ("source", "target", "phrases"))
    source.write_text("red old\n\nblue new green\n")
    phrases.write_text("neu\n\nalt\tneu\n")
    run_option, pairs = f"--run={finished.folder}", f"--data={source},{target}"
    command = ["translate", run_option, f"--input={source}", f"--phrases={phrases}"]
    first, blank, last = json_lines([*command, "--json", "--beam=4", "--align", "all"], capsys)
    assert "neu" in first["text"]
    assert all(word in last["text"] for word in ("alt", "neu"))
    assert blank["text"] == blank["alignment"] == ""
    assert re.fullmatch(r"(\d+-\d+ ?)+", last["alignment"])

    target.write_text(f"{first['text']}\n\n{last['text']}\n")
    main(["score", run_option, pairs])
    out, error = capsys.readouterr()
    numbers = [float(line) for line in out.splitlines()]
    assert numbers[1] == 0
    assert re.search(r"\d+ tokens: perplexity [\d.]+\n$", error)
    scored = json_lines(["score", run_option, pairs, "--json"], capsys)
    of_ensemble = printed(["score", run_option, run_option, pairs], capsys)
    assert of_ensemble.splitlines()[1] == "0.000000"
    alignments = printed(["align", run_option, pairs], capsys).splitlines()
    assert alignments[1] == ""
    translator = Translator.load(finished.folder)
    scorer = Scorer(translator)
    source_ids = map(translator.encode, ("red old", "blue new green"))
    for i, line, ids in zip((0, 2), (first, last), source_ids, strict=True):
        assert sum(scored[i]["log_probs"]) == pytest.approx(numbers[i], abs=1e-4)
        # The search may spell a text with other tokens, or without the end symbol.
        tokens = translator.tokenizers.target.find
        (exact,) = scorer.of_ids([(ids, [tokens(piece) for piece in line["tokens"]])])
        assert line["log_prob"] == pytest.approx(exact.log_prob, abs=1e-4)
        if scored[i]["tokens"] == line["tokens"]:
            assert numbers[i] == pytest.approx(line["log_prob"], abs=1e-4)
            assert alignments[i] == line["alignment"]
    assert printed(["align", run_option, pairs, "--layer=0.1", "--pieces"], capsys).count("\n") == 3
    for layers, message in (("9", "layer 9 of cross-attention: does not exist"), ("a", "LAYER.H")):
        assert message in error_line(["align", run_option, pairs, f"--layer={layers}"], capsys)
    target.write_text("rot\n")
    assert "has 3 lines and" in error_line(["score", run_option, pairs], capsys)


def test_each_pair_has_a_line_or_a_reason(finished: Run, tmp_path: Path, capsys: Capture) -> None:
    """Blank, or longer than the model: as if it were not there for the others."""
    pairs = ["red\trot", "\trot", f"{'red ' * 99}\trot", f"red\t{'rot ' * 99}", "\t", "red\trot"]
    data = tmp_path / "pairs.tsv"
    data.write_text("".join(f"{pair}\n" for pair in pairs))
    command = [f"--run={finished.folder}", f"--data={data}"]
    main(["score", *command])
    out, error = capsys.readouterr()
    lines = out.split("\n")
    assert len(lines) == 7
    assert float(lines[0]) == float(lines[5]) < 0
    assert float(lines[4]) == 0
    assert [line.partition("\t")[0] for line in lines[1:4]] == ["nan"] * 3
    assert lines[1].endswith("\thas a target, but a blank source; give both")
    first = f"3 pairs left out; the first: {data}, line 2: has a target, but a blank source; give"
    assert first in error
    assert "2 tokens: perplexity" not in error
    records = json_lines(["score", *command, "--json"], capsys)
    assert [record["line"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["log_prob"] is None for record in records] == [False, *[True] * 3, False, False]
    assert all("must be at most 31" in record["reason"] for record in records[2:4])
    main(["align", *command])
    out, error = capsys.readouterr()
    alignments = out.split("\n")
    assert alignments[1:5] == [""] * 4
    assert alignments[0] == alignments[5] != ""
    assert first in error


def test_averages_are_runs(finished: Run, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "average"
    main(["average", f"--run={finished.folder}", "--last=2", f"--out={out}"])
    assert "average of steps 8, 12" in capsys.readouterr().out
    assert len(Translator.load(out)(["red"])) == 1
    command = ["average", f"--run={finished.folder}", f"--out={tmp_path / 'b'}"]
    assert "--last=0" in error_line([*command, "--last=0"], capsys)
    assert "7" in error_line([*command, "--steps", "7"], capsys)
    assert not (tmp_path / "b").exists()


@pytest.fixture
def uploaded(finished: Run, bucket: Bucket) -> AnyPath:
    """A copy of `finished` in object storage."""
    bucket.objects.clear()
    folder = find_path("gs://bucket/runs/finished")
    for name, path in files_below(finished.folder).items():
        (folder / name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.long
def test_runs_in_object_storage_are_as_others(
    finished: Run, uploaded: AnyPath, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """They are averaged, translate, and are shown and evaluated alike."""
    monkeypatch.setattr(planning, "usable_host_memory", lambda: 2**30)  # which changes
    (tmp_path / "input").write_text("red old\nblue\n")
    shown = []
    outs = tmp_path / "average", "gs://bucket/runs/average"
    for source, out in zip((finished.folder, uploaded), outs, strict=True):
        main(["average", f"--run={source}", "--last=2", f"--out={out}"])
        assert capsys.readouterr().out == f"{out}: average of steps 8, 12\n"
        main(["translate", f"--run={out}", f"--input={tmp_path / 'input'}", "--beam=1"])
        main(["inspect", f"--run={source}"])
        main(["evaluate", f"--run={source}", "--beam=1"])
        shown.append(re.sub(r"sentences_per_s [\d.,]+", "", capsys.readouterr().out))
    assert shown[0] == shown[1]
    again = error_line(["average", f"--run={uploaded}", "--out=gs://bucket/runs/average"], capsys)
    assert "run gs://bucket/runs/average: is not empty" in again


def test_inspection_of_a_run(finished: Run, monkeypatch: Patch, capsys: Capture) -> None:
    main(["inspect", f"--run={finished.folder}", "--devices=64", "--config.mesh.fsdp=4"])
    text = capsys.readouterr().out
    for word in ("parameters", "of slots filled", "temporaries, MiB (estimated)"):
        assert word in text
    assert re.search(r"^model       layers=1  d_model=16  .*d_ff=32  .*$", text, re.M)
    assert "\nexport      int8, stablehlo, ctranslate2, huggingface\n" in text
    assert "source text: 1." in text
    assert "training text: 150 pairs read, of which" in text
    assert "sources are in the training text, too" in text
    assert len(text.splitlines()) < 40
    assert "64 devices, mesh data 16 x fsdp 4; on each of them:" in text
    assert re.search(r"\nmemory      [\d.]+ MiB of [\d,.]+ MiB\n$", text)
    monkeypatch.setattr(planning, "usable_host_memory", lambda: 5 * 2**18)
    main(["inspect", f"--run={finished.folder}", "--devices=1"])
    *_, text = capsys.readouterr().out.partition("\nmemory      does not fit: ")
    verdict, *ways = text.splitlines()
    assert re.fullmatch(r"[\d.]+ MiB of 1.2 MiB", verdict)
    options = [way.split()[0] for way in ways]
    assert options == ["--config.optimizer.accumulate=2:", "--config.data.batch_tokens=128:"]


def test_devices_and_corpora_that_are_not_here_are_planned(capsys: Capture) -> None:
    command = "inspect --config=quickstart --config.data.train no.tsv --length=32 --devices=8"
    main([*command.split(), "--config.data.dev", "no.tsv", "--device-memory=1.5GiB"])
    text = capsys.readouterr().out
    assert "vocabulary  2,000 source, 2,000 target ids" in text
    assert re.search(r"^ +64 +32 +32 +[\d.]+ ", text, re.M)
    assert re.search(r"\nmemory      [\d.]+ MiB of 1,536.0 MiB\n$", text)


def test_inspection_prints_json_alone(finished: Run, capsys: Capture) -> None:
    main(["inspect", f"--run={finished.folder}", "--config.data.train=gone\x1b.tsv", "--json"])
    text = capsys.readouterr().out
    assert from_json(json.loads(text)).model == finished.config.model
    assert "\x1b" not in text


@pytest.mark.long
def test_inspection_compiles(finished: Run, capsys: Capture) -> None:
    command = ["inspect", f"--run={finished.folder}", "--config.data.shapes=1", "--compile"]
    assert "compiled in, s" in printed(command, capsys)


def test_inspection_needs_no_data_for_what_the_run_holds(
    fixtures: Path, capsys: Capture, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", f"--run={fixtures / 'run'}", "--config.data.train=gone.tsv"])
    shown = capsys.readouterr()
    assert "parameters" in shown.out
    assert "checkpoints 2500" in shown.out
    assert "gone.tsv" in shown.err
    error = error_line(["inspect", f"--run={tmp_path / 'none'}"], capsys)
    assert error.endswith(f"run {tmp_path / 'none'}: no such folder")


OWN_ATTENTION = """
from transformer_jax.attention import AttentionOutput, register_kind
from transformer_jax.attention.reference import reference
from transformer_jax.attention.scores import SCORES

def sharp(inputs):
    rest = inputs.key, inputs.value, inputs.mask
    return AttentionOutput(*inputs.attend(2 * inputs.query, *rest))

def kernel(*arguments, **options):
    return reference(*arguments, **options)

register_kind("sharp", sharp)
SCORES["own"] = SCORES["scaled_dot"]
"""


@pytest.mark.long
def test_a_module_of_ones_own_is_imported_on_the_command_line_only(
    tiny_config: Config, here: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """A run stores the names of a kind, a score and a kernel, and loading it imports nothing."""
    Path("own_attention.py").write_text(OWN_ATTENTION)
    monkeypatch.setattr(sys, "path", [*sys.path])
    imported = ["--import", "own_attention"]
    config = write_config(changed(tiny_config, data={"dev": ()}), here / "config.py")
    training = ["train", f"--config={config}", "--run=run", "--config.train.steps=1"]
    kind = "--config.model.cross-attention.kind=sharp"
    score = "--config.model.decoder-attention.score=own"
    for option, name in ((kind, "kind='sharp'"), (score, "score='own'")):
        error = error_line([*training, option], capsys)
        assert f"{name}: unknown" in error
        assert "; one of your own needs --import MODULE" in error
    assert not Path("run").exists()
    main([*training, kind, score, *imported, "--config.execution.kernel=own_attention:kernel"])
    stored = json.loads(Path("run/config.json").read_text())["config"]
    assert stored["model"]["cross_attention"]["kind"] == "sharp"
    assert stored["execution"]["kernel"] == "own_attention:kernel"
    assert run.load(Path("run")).config.execution.kernel == "auto"
    translation = ["translate", "--run=run", "--input=/dev/null"]
    longer = ["train", "--run=run", "--config.train.steps=2", "--config.execution.kernel=auto"]
    forget()
    capsys.readouterr()
    for command in (translation, longer):
        assert ": unknown" in error_line(command, capsys)
    main([*translation, *imported])
    forget()
    capsys.readouterr()
    error = error_line(["translate", "--run=run", "--import", "nowhere"], capsys)
    assert "--import 'nowhere': cannot be imported: No module named 'nowhere'" in error


def forget() -> None:
    """Makes the module of one's own unknown, as in a process that starts."""
    del kinds.KINDS["sharp"], scores.SCORES["own"], sys.modules["own_attention"]


def test_a_kernel_is_looked_up_also_where_no_attention_needs_one(
    config_file: Path, tmp_path: Path, capsys: Capture
) -> None:
    plain = [f"--config.model.{side}-attention.kind=plain" for side in ("encoder", "decoder")]
    training = ["train", f"--config={config_file}", f"--run={tmp_path / 'run'}", *plain]
    training += ["--config.model.cross-attention.score=additive"]
    training += ["--config.model.attention-dropout=0"]
    for kernel, message in (("nowhere:f", "cannot be imported"), ("cudnn", "runs on gpu, not on")):
        line = error_line([*training, f"--config.execution.kernel={kernel}"], capsys)
        assert message in line
    assert not (tmp_path / "run").exists()


def allocator_of(tmp_path: Path, **variables: str) -> str:
    """Returns what a program finds in GLIBC_TUNABLES, and its arguments, with these variables."""
    code = "import os, sys; from transformer_jax.allocator import *; restart_with_allocator(); "
    code += "print(os.environ.get('GLIBC_TUNABLES'), sys.argv[1:])"
    removed = ("GLIBC_TUNABLES", "JAX_PLATFORMS")
    environment = {k: v for k, v in os.environ.items() if k not in removed}
    return subprocess.run(
        [sys.executable, "-c", code, "--x=1"],
        env=environment | {"PYTHONPATH": str(tmp_path)} | variables,
        capture_output=True,
        text=True,
    ).stdout


def test_the_allocator_is_set_once_and_not_for_accelerators(tmp_path: Path) -> None:
    users = {"GLIBC_TUNABLES": "glibc.malloc.check=0"}
    shown = allocator_of(tmp_path, JAX_PLATFORMS="cpu", **users)
    assert shown == "glibc.malloc.check=0 ['--x=1']\n"
    assert allocator_of(tmp_path, JAX_PLATFORMS="cuda,cpu") == "None ['--x=1']\n"
    (tmp_path / "jax_plugins").mkdir()  # as the packages of JAX for CUDA have it
    assert allocator_of(tmp_path) == "None ['--x=1']\n"
    assert allocator_of(tmp_path, JAX_PLATFORMS="cpu") == f"{ALLOCATOR} ['--x=1']\n"


def test_bad_runs_are_error_line(copied: Run, tmp_path: Path, capsys: Capture) -> None:
    def message(folder: AnyPath) -> str:
        return error_line(["translate", f"--run={folder}", "--input=/dev/null"], capsys)

    assert "no such folder" in message(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "is empty" in message(tmp_path / "empty")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    assert "is not a run" in message(tmp_path / "other")

    copied.checkpoints.rename(tmp_path / "checkpoints")
    assert "no whole checkpoint yet" in message(copied.folder)
    contents = json.loads((copied.folder / "config.json").read_text()) | {"tokenizers": ["a"]}
    del contents["sha256"]
    (copied.folder / "config.json").write_bytes(json.dumps(contents).encode())
    assert "tokenizers=['a']: must be two" in message(copied.folder)
