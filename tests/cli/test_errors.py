"""What is wrong in a command line, a run or a file is said in one line that is safe to print."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from common import Capture, Patch, error_line, printed
from object_store import Bucket

from tools.common import config_file
from transformer_jax.cli.main import main
from transformer_jax.config import Config
from transformer_jax.runs import checkpoint
from transformer_jax.runs.run import Run

QUICKSTART = f"--config={Path('configs/quickstart.py').resolve()}"

RED = "\x1b[31mred\x9b0m"
"""A sentence with control characters that begin escape sequences in a terminal."""


def edit_config(made: Run, change: Callable[[Any], Any]) -> bytes:
    """Changes the run's stored config. Returns the text of config.json, which has no digest."""
    path = made.folder / "config.json"
    stored = json.loads(path.read_text("utf-8"))
    del stored["sha256"]
    change(stored["config"])
    path.write_bytes(json.dumps(stored).encode())
    return path.read_bytes()


@pytest.fixture
def nothing_written(bucket: Bucket, here: Path) -> Iterator[None]:
    """The current folder is empty, also in the end, and the bucket is then as before."""
    objects = dict(bucket.objects)
    yield
    assert not list(here.iterdir())
    assert bucket.objects == objects


AGAIN = ": given 2 times; give it once, with all its values"
SHARED = ": is read once, but named 2 times"
TRAIN, PLAN = "train --config=QUICKSTART --run=r", "inspect --config=QUICKSTART"
BACK_TRANSLATE = "back-translate --run=RUN --text=x --pairs=grammar --output=x.tsv"
SMALL, SEARCH = "train --config=CONFIG --run=r", "translate --run=RUN --config.decode"
BENCH, VIEW = "bench attention --heads=2 --lengths=8", "attention --run=RUN red -o"
REFUSED = [
    ("trian", "trian: unknown command; did you mean train?"),
    ("translate", "--run"),
    ("train --run=no-such-run", "name a config file"),
    ("train --config --run=r", "--config: needs the path of a config file"),
    ("train --run=r --config", "--config: needs the path of a config file"),
    ("translate --run=x --config.model.layers=2", "the config is that of the run; only the search"),
    ("average --run=x --out=y --config.model.layers=2", "takes the config from the run"),
    (f"{BENCH} --config.model.layers=2", "--config: bench attention has no config"),
    # What is near to what is known
    ("translate --run=x --bean=3", "did you mean --beam?"),
    ("train --run=x --confg=y", "did you mean --config?"),
    (f"{PLAN} --config.model.cross-attention.kind=local", "unknown; did you mean local-"),
    (f"{PLAN} --config.execution.kernel=blockwis", "unknown; did you mean blockwise?"),
    # What is given again
    (f"{TRAIN} --config.data.train A --config.data.train B", f"--config.data.train{AGAIN}"),
    (f"{TRAIN} --config.data.max_ratio=2 --config.data.max-ratio=3", AGAIN),
    (f"{TRAIN} --run=s", AGAIN),
    ("attention --run=r -o a --output=b sentence", AGAIN),
    ("translate --run=r --input=- --prefix=-", f"-{SHARED}"),
    ("translate --run=r --input=/dev/stdin --phrases=-", f"-{SHARED}"),
    ("translate --run=r --input=/dev/fd/63 --prefix=/dev/fd/63", f"/dev/fd/63{SHARED}"),
    # Training
    (f"{SMALL} --config.tokenizer.vocabulary=20000", "tokenizer.vocabulary=20000"),
    (f"{SMALL} --config.tokenizer.models a.tsv", "tokenizer a.tsv: not a SentencePiece model"),
    (f"{SMALL} --config.tokenizer.models pipe", "tokenizer pipe: is a pipe, and would be read"),
    (f"{TRAIN} --config.data.train pipe --processes=2", "pipe: is a pipe, which only one process"),
    (f"{SMALL} --init-from=RUN --init-parts encoder --config.model.layers=2", "model.layers=2:"),
    (f"{SMALL} --config.model.decoder-start-id=5000", "decoder_start_id=5000: must be below the"),
    (f"{SMALL} --config.optimizer.frozen encoder norm", "optimizer.frozen='norm': matches no"),
    (f"{SMALL} --config.data.train", "data.train=(): must name at least one corpus"),
    (f"{SMALL} --config.data.train a.tsv,a.tsv", "a.tsv holds both sides, and is a corpus alone"),
    (f"{SMALL} --init-parts encoder", "--init-parts=encoder: needs --init-from"),
    (f"{SMALL} --config.train.decode-every=None", "must be a number where train.best='bleu'"),
    (f"{SMALL} --metric=builtins:zip", "--metric zip: returns <zip object at"),
    (f"{SMALL} --metric=math:fsum", "--metric 'math:fsum': TypeError:"),
    (f"{SMALL} --metric=builtins:zip --config.data.dev", "zip: needs a development corpus"),
    (f"{SMALL} --metric=no_such:comet", "--metric 'no_such:comet': cannot be imported"),
    (f"{SMALL} --reporter=math:report", "--reporter 'math:report': cannot be imported"),
    (f"{SMALL} --profile=-1", "--profile=-1: must be at least 0"),
    (f"{TRAIN} --from-card=x.json", "--from-card: holds the config; leave out --config"),
    ("train --any-versions --run=r", "needs --from-card"),
    ("train --from-card=missing.json#a --run=r", "card missing.json#a: No such file or directory"),
    # Devices and processes
    (f"{TRAIN} --config.mesh.fsdp=3", "that fits is mesh.data=2 mesh.fsdp=4 mesh.tensor=1"),
    (f"{TRAIN} --config.mesh.data=3", "mesh.tensor=1: needs 3 devices, not 8; the nearest that"),
    (f"{TRAIN} --config.mesh.data=0", "mesh.data=0: must be above 0, or -1"),
    (f"{TRAIN} --config.mesh.pipeline=2", "mesh.pipeline=2; known: data, fsdp, tensor"),
    (f"{TRAIN} --config.mesh.tensor=8", "mesh.tensor=8: must divide model.heads=4"),
    (f"{PLAN} --config.mesh.fsdp=4 --devices=6", "needs a multiple of 4 devices, not 6"),
    (f"{PLAN} --devices=0", "--devices=0: must be at least 1"),
    (f"{PLAN} --devices=64 --compile", "--devices=64: there are 8 here to compile for; leave out"),
    (f"{PLAN} --topology=v5e:2x4 --devices=8", "--topology: has its own number of devices; leave"),
    (f"{PLAN} --topology=v5e:3x3", "topology v5e:3x3: "),
    (f"{PLAN} --device-memory=80", "--device-memory=80: must be a size such as 80GiB"),
    (f"{PLAN} --device-memory=0GiB", "--device-memory=0GiB: must be a size"),
    (f"{PLAN} --length=65", "--length=65: must be from 1 to 64, model.max_length or data.batch"),
    (f"{TRAIN} --processes=0", "--processes=0: must be at least 1"),
    (f"{TRAIN} --processes=2 --coordinator=a:1", "--processes: starts its own coordinator; leave"),
    (f"{TRAIN} --coordinator=a", "--coordinator=a: must be HOST:PORT or auto"),
    (f"{TRAIN} --coordinator=a:1", "--coordinator=a:1: needs --process=I/N, too"),
    (f"{TRAIN} --process=0/2", "--process=0/2: needs --coordinator=HOST:PORT"),
    (f"{TRAIN} --coordinator=a:1 --process=2/2", "=2/2: must be I/N with I from 0 to N - 1"),
    (f"{TRAIN} --coordinator=a:1 --process=1", "=1: must be I/N with I from 0 to N - 1"),
    # Translation
    ("evaluate --run=RUN --show=-1", "--show=-1: must be at least 0"),
    ("translate --run=RUN --output=x.gz", "--output=x.gz: is written as plain text; name it"),
    ("evaluate --run=RUN --data a.tsv --output=x.xz", "--output=x.xz: is written as plain text"),
    (f"{SEARCH}.beam=4 --beam=5", "--beam: is also given as --config.decode.beam; give one of"),
    (f"{BACK_TRANSLATE} --config.decode.n-best=2", "decode.n_best: leave it out; back-translate"),
    ("check --run=RUN --config.model.layers=3", "model.layers=3: "),
    (f"{SEARCH}.sample=True --config.decode.top-p=0", "top_p=0.0: must be above 0 and at most 1"),
    (f"{SEARCH}.temperature=0", "decode.temperature=0.0: must be above 0"),
    (f"{SEARCH}.top-k=3", "decode.top_k=3: must be left out without decode.sample=true"),
    (f"{SEARCH}.min-length=9 --config.decode.max-length=9", "must be below decode.max_length=9"),
    (f"{SEARCH}.min-length=32", "decode.min_length=32: must be below model.max_length=32"),
    (f"{SEARCH}.suppress=</s>", "decode.suppress: must not hold the end symbol </s>"),
    # Pictures and measurements
    (f"{VIEW} x.doc", "unknown format; name a file that ends with .html, .svg,"),
    (f"{VIEW} x.html --layer=last", "--layer last: must be LAYER"),
    (f"{VIEW} x.html --layer=9", "cross attention: layer 9: does not exist"),
    (f"{VIEW} x.html --run=r", "--run: given 2 times; name the run to look into"),
    ("plot RUN -o x.doc", "unknown format"),
    ("plot RUN -o none/x.svg", "--output=none/x.svg: there is no folder none; make it first"),
    ("plot RUN -o RUN", ": is a folder; name a file in it"),
    ("plot none.json -o x.svg", "none.json: no such file"),
    ("plot none -o x.svg", "run none: no such folder"),
    (f"{BENCH} --kernels cudnn", "kernel='cudnn': runs on gpu, not on cpu; use xla"),
    (f"{BENCH} --kv-heads=3", "kv_heads=3: must divide heads=2"),
    (f"{BENCH} --kv-heads=0", "kv_heads=0: must be at least 1"),
    ("bench attention --lengths 0", "lengths=(0,): must be one or more numbers of at least 1"),
    (f"{BENCH} --masks full fulll", "fulll"),
]
"""Commands and what is said of them; the words in capitals stand for files that there are."""


@pytest.mark.parametrize(("command", "message"), REFUSED)
def test_a_bad_command_is_one_line_and_writes_nothing(
    command: str, message: str, finished: Run, tiny_config: Config, here: Path, capsys: Capture
) -> None:
    config = config_file(tiny_config, here / "config.py")
    files = {"--config=QUICKSTART": QUICKSTART, "CONFIG": config, "RUN": finished.folder}
    for name, path in files.items():
        command = command.replace(name, str(path))
    Path("a.tsv").write_text("one\teins\ntwo zwei\n")
    os.mkfifo("pipe")
    assert message in error_line(command.split(), capsys)
    assert {path.name for path in here.iterdir()} == {"a.tsv", "config.py", "pipe"}


def test_control_characters_of_a_config_key_are_escaped(copied: Run, capsys: Capture) -> None:
    edit_config(copied, lambda config: config.update({RED: {}}))
    error = error_line(["translate", f"--run={copied.folder}"], capsys)
    assert r"\x1b[31mred\x9b0m: unknown key" in error
    assert "\x1b" not in error
    assert "\x9b" not in error


def test_control_characters_of_shown_sentences_are_escaped(
    finished: Run, tmp_path: Path, capsys: Capture
) -> None:
    corpus = tmp_path / "dev.tsv"
    corpus.write_text(f"red {RED}\trot {RED}\n", "utf-8")
    main(["evaluate", f"--run={finished.folder}", f"--data={corpus}", "--show=1"])
    shown = capsys.readouterr().out
    assert r"source     red \x1b[31mred\x9b0m" in shown
    assert r"reference  rot \x1b[31mred\x9b0m" in shown
    assert not {"\x1b", "\x9b"} & set(shown)


def test_an_old_best_step_is_not_averaged(copied: Run, tmp_path: Path, capsys: Capture) -> None:
    """The run keeps two checkpoints, and the best one although it is old."""
    edit_config(copied, lambda config: config["train"].update(keep=2))
    steps = checkpoint.steps(copied.checkpoints)
    command = ["average", f"--run={copied.folder}", f"--out={tmp_path / 'out'}"]
    error = error_line([*command, "--last=3"], capsys)
    assert f"2 newest checkpoints ({steps[-2]}, {steps[-1]})" in error
    assert f"average of steps {steps[-2]}, {steps[-1]}" in printed(command, capsys)


@pytest.mark.parametrize("command", ["evaluate", "score", "align"])
def test_a_run_without_development_data_needs_a_corpus(
    command: str, copied: Run, capsys: Capture
) -> None:
    edit_config(copied, lambda config: config["data"].update(dev=[]))
    line = error_line([command, f"--run={copied.folder}"], capsys)
    assert "--data: must name a corpus, since the run has no data.dev" in line


def test_a_stored_kernel_is_never_replaced_without_a_word(copied: Run, capsys: Capture) -> None:
    stored = edit_config(copied, lambda config: config["execution"].update(kernel="own:fast"))
    error = error_line(["train", f"--run={copied.folder}"], capsys)
    assert "execution.kernel='own:fast'" in error
    assert "--config.execution.kernel=own:fast" in error
    assert "--config.execution.kernel=auto" in error
    assert (copied.folder / "config.json").read_bytes() == stored
    main(["translate", f"--run={copied.folder}", "--input=/dev/null"])
    main(["train", f"--run={copied.folder}", "--config.execution.kernel", "reference"])


@pytest.mark.long
def test_the_cache_of_another_machine(copied: Run, tmp_path: Path, capsys: Capture) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    edit_config(copied, lambda config: config["data"].update(cache=elsewhere))
    main(["evaluate", f"--run={copied.folder}", "--beam=1"])
    assert "loss" in printed(["inspect", f"--run={copied.folder}"], capsys)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("arguments", ["--config a.py --config.model.layers=4 -h", "-h --config=a"])
def test_help_is_help_beside_any_config(arguments: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", *arguments.split()])
    assert not stop.value.code
    assert "--run" in capsys.readouterr().out


@pytest.mark.long
def test_a_run_translates_on_another_mesh(finished: Run, tmp_path: Path, capsys: Capture) -> None:
    lines = tmp_path / "lines.en"
    lines.write_text("red green\nold\n", "utf-8")
    outputs = []
    for mesh in ([], ["--mesh", "data=2", "fsdp=2", "tensor=2"]):
        main(["translate", f"--run={finished.folder}", f"--input={lines}", *mesh])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    for mesh, message in {
        "tensor=4": "mesh.tensor=4: must divide model.heads=2",
        "tensr=2": "--mesh tensr: unknown key; did you mean tensor?",
        "fsdp=all": "--mesh fsdp=all: must be AXIS=N, such as fsdp=4",
    }.items():
        command = ["translate", f"--run={finished.folder}", "--mesh", mesh]
        assert message in error_line(command, capsys)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("s3://bucket/run", "s3:// is not supported; name a folder on a disk or gs://BUCKET/NAME"),
        ("memory://run", "memory:// is not supported; name a folder on a disk or gs://BUCKET/NAME"),
        ("gs:/bucket/run", "must be a str gs://BUCKET/NAME"),  # what Path makes of gs://bucket/run
        ("gs://bucket", "must be a str gs://BUCKET/NAME"),
        (
            "gs://bucket/run#1",
            "must be a str gs://BUCKET/NAME with letters, digits and -_.=+@/ onl",
        ),
        ("gs://bucket/runs/../run", "must be a str gs://BUCKET/NAME"),
        ("gs://nowhere/run", "no such bucket"),
        ("gs://private/run", "access, 401; log in with 'gcloud auth application-default login'"),
        ("gs://bucket/missing", "needs gcsfs; pip install 'transformer-jax[gcs]'"),
    ],
)
@pytest.mark.parametrize("command", [f"train {QUICKSTART} --run", "average --run=RUN --out"])
@pytest.mark.usefixtures("nothing_written")
def test_object_storage_that_cannot_be_used_is_named(
    command: str, place: str, message: str, finished: Run, monkeypatch: Patch, capsys: Capture
) -> None:
    words = f"{command}={place}".replace("RUN", str(finished.folder)).split()
    if "gcsfs" in message:
        monkeypatch.setitem(sys.modules, "gcsfs", None)
    error = error_line(words, capsys)
    assert f"error: {place}: " in error
    assert message in error


def test_what_needs_a_disk_is_refused_in_object_storage(
    finished: Run, nothing_written: None, capsys: Capture
) -> None:
    run, new = f"--run={finished.folder}", "--run=gs://bucket/runs/new"
    train, url = ["train", QUICKSTART], "gs://bucket/x"
    for command, message in (
        ([*train, new, "--profile=2"], "--profile=2: needs a run on a disk, not gs://"),
        ([*train, new, "--tensorboard"], "--tensorboard: needs a run on a disk, not gs:"),
        ([*train, "--run=r", f"--config.data.cache={url}"], f"data.cache={url}: gs:// is"),
        (["translate", run, "--input=/dev/null", f"--output={url}"], f"--output={url}: gs:// is"),
        (["translate", run, f"--input={url}"], f"{url}: No such file or directory"),
        (["bench", "attention", f"--dump={url}"], "--dump=gs:/bucket/x: gs:// is not supported"),
        (["bench", "attention", f"--out={url}"], "--out=gs:/bucket/x: gs:// is not supported"),
    ):
        assert message in error_line(command, capsys)
