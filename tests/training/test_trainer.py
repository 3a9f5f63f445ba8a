"""Training from text to run folder: continuing, refusing, stopping."""

import itertools
import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from common import changed, flat, write_pairs
from object_store import Bucket, Object
from sentencepiece import sentencepiece_model_pb2
from training_process import arrays, assert_same, of_kind, records

from transformer_jax.config import Config, TrainConfig
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.files import AnyPath, find_path
from transformer_jax.models.parameter_paths import split
from transformer_jax.parallel.compile import DETERMINISTIC
from transformer_jax.parallel.mesh import shard_batch
from transformer_jax.runs import checkpoint, run
from transformer_jax.runs.checkpoint import Checkpoints
from transformer_jax.text.tokenizer import Tokenizer
from transformer_jax.training import setup, trainer
from transformer_jax.training.initialization import params_from
from transformer_jax.training.optimizer import OPTIMIZERS
from transformer_jax.training.planning import compile_gradients
from transformer_jax.training.reporters import MetricsFile, Record, read_metrics
from transformer_jax.training.resume import Progress, first_state, plan_start
from transformer_jax.training.setup import loss_fn, prepare, set_up
from transformer_jax.training.signals import StopRequest
from transformer_jax.training.step import LossSums
from transformer_jax.training.trainer import Trainer, train
from transformer_jax.types import Batch


def test_a_run_stands_alone(finished: run.Run) -> None:
    assert run.load_config(finished.folder) == finished.config
    assert checkpoint.steps(finished.checkpoints)[-1] == 12
    stored = json.loads((finished.folder / "config.json").read_text())
    assert stored["format"] == run.FORMAT
    assert stored["provenance"]["data_digests"].keys() == {"train", "dev"}
    devices = {"count": jax.device_count(), "platform": "cpu", "kind": "cpu"}
    assert stored["provenance"]["devices"] == devices
    assert len(Translator.load(finished.folder)(["red old", "", "blue"])) == 3


def test_metrics_tell_what_happened(finished: run.Run) -> None:
    records = read_metrics(finished.folder / "metrics.jsonl")
    trained, evaluations = (of_kind(finished, kind) for kind in ("train", "evaluation"))
    assert [record["step"] for record in trained] == [2, 4, 6, 8, 10, 12]
    times = [datetime.fromisoformat(record["time"]) for record in records]
    assert times == sorted(times)
    assert timedelta(0) <= datetime.now(UTC) - times[0] < timedelta(hours=1)
    wanted = {"loss", "grad_norm", "lr", "tokens_per_s", "padding", "epoch", "minutes", "done"}
    assert all(wanted <= record.keys() for record in trained)
    assert [r["step"] for r in evaluations] == [6, 12]
    scores = next(iter(evaluations[0]["sets"].values()))
    assert scores.keys() == {"loss", "perplexity", "bleu", "chrf"}
    assert len(evaluations[0]["samples"]) == 3


class Stop(Exception):
    pass


def stop_at(step: int, kind: str = "train") -> Callable[[dict[str, Any]], None]:
    """Returns a reporter that ends training once it is called with this record."""

    def reporter(record: dict[str, Any]) -> None:
        if (record["kind"], record["step"]) == (kind, step):
            raise Stop

    return reporter


def assert_resumes(config: Config, whole: run.Run, folder: Path, kind: str = "train") -> None:
    """Killed after step 6, or its evaluation, and continued, `config` is the run `whole`."""
    with pytest.raises(Stop):
        train(config, folder, reporters=[stop_at(6, kind)])  # between checkpoints 4 and 8
    assert checkpoint.steps(folder / "checkpoints") == [4]
    assert_continues(config, whole, folder)


def assert_continues(config: Config, whole: run.Run, folder: AnyPath) -> None:
    """Continued at step 4, `config` in `folder` is the run `whole`."""
    messages = []
    continued = train(config, folder, reporters=[messages.append])
    assert any("continuing" in r.get("text", "") and "step 4" in r["text"] for r in messages)
    assert_same(continued, whole)


@pytest.mark.parametrize("kind", ["train", pytest.param("evaluation", marks=pytest.mark.long)])
def test_a_run_stopped_and_resumed_is_bit_identical(
    kind: str, tiny_config: Config, finished: run.Run, tmp_path: Path
) -> None:
    """Dropout, subword sampling and moving average on, in the middle of an epoch."""
    assert_resumes(tiny_config, finished, tmp_path / "r", kind)


@pytest.mark.long
def test_so_is_one_in_object_storage_that_was_killed(
    tiny_config: Config, finished: run.Run, bucket: Bucket
) -> None:
    """After step 6, with the checkpoint of step 4 as the last whole one."""
    folder = find_path("gs://bucket/runs/killed")
    left: list[dict[str, Object]] = []

    def kill(record: dict[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] == 6:
            while checkpoint.steps(folder / "checkpoints") != [4]:
                time.sleep(0.1)
            left.append(dict(bucket.objects))
            raise Stop

    with pytest.raises(Stop):
        train(tiny_config, folder, reporters=[kill])
    bucket.objects = left[0]  # without what was written after step 6
    assert [r["step"] for r in read_metrics(folder / "metrics.jsonl")] == [2, 4]
    assert_continues(tiny_config, finished, folder)


@pytest.mark.long
def test_so_is_one_of_packed_rows_in_pieces(tiny_config: Config, tmp_path: Path) -> None:
    """Some of its parameters are frozen."""
    packed = {"packing": True, "packed_length": 32, "dev": ()}
    options = {"accumulate": 2, "frozen": ("encoder", "norms")}
    config = changed(tiny_config, data=packed, optimizer=options)
    said: list[Record] = []
    whole = train(config, tmp_path / "whole", reporters=[said.append])
    frozen_and_trained = split(whole.params(), config.optimizer.frozen)
    counts = re.findall(r"parameters: (\S+) are trained, and (\S+) are frozen", str(said))
    sizes = [sum(leaf.size for leaf in flat(tree).values()) for tree in frozen_and_trained]
    assert counts == [(f"{sizes[1]:,}", f"{sizes[0]:,}")]
    assert_resumes(config, whole, tmp_path / "r")


@pytest.mark.long
def test_mixed_corpora_are_shown_and_resumed(tiny_config: Config, tmp_path: Path) -> None:
    """Stopped at step 3, between two records, and at step 9."""
    names = tuple(write_pairs(tmp_path, name, count, 3) for name, count in (("a", 90), ("b", 9)))
    mixed = {"train": names, "weights": (2.0, 1.0), "dev": ()}
    config = changed(tiny_config, data=mixed, train={"log_every": 4})
    shown: list[dict[str, Any]] = []
    whole = train(config, tmp_path / "whole", reporters=[shown.append])
    texts = [record.get("text", "") for record in shown]
    assert f"corpus {names[1]}: 9 pairs, 33.3% of those drawn, each 3.67 times an epoch" in texts
    assert all(record["pairs"].keys() == {*names} for record in records(whole))
    large, small = np.sum([[*record["pairs"].values()] for record in records(whole)], axis=0)
    assert 0.28 < small / (large + small) < 0.38
    for steps in (3, 9, 12):
        again = train(changed(config, train={"steps": steps}), tmp_path / "again")
    assert_same(again, whole)


@pytest.mark.long
def test_a_corpus_that_is_named_twice_is_counted_whole(tiny_config: Config, tmp_path: Path) -> None:
    (name,) = tiny_config.data.train
    twice = {"train": (name, name), "weights": (1.0, 1.0), "dev": ()}
    once = train(changed(tiny_config, data=twice, train={"steps": 2}), tmp_path / "r")
    counted = sum(record["pairs"][name] for record in records(once))
    loaded = itertools.islice(setup.prepare(once.config).loader.batches(0), 2)
    assert counted == sum(sum(each.drawn) for each in loaded)


@pytest.mark.long
def test_more_steps_continue_a_run(tiny_config: Config, tmp_path: Path, finished: run.Run) -> None:
    """Also under another search, which the run then has, and with a peak for the utilization."""
    train(changed(tiny_config, train={"steps": 8}), tmp_path / "r")
    other = changed(tiny_config, decode={"beam": 2}, execution={"peak_tflops": 0.5})
    said: list[dict[str, Any]] = []
    longer = train(other, tmp_path / "r", reporters=[said.append])
    changes = (
        "changed: train.steps: 8 -> 12; decode.beam: 4 -> 2; execution.peak_tflops: None -> 0.5"
    )
    assert any(f"at step 8; {changes}" in r.get("text", "") for r in said)
    assert arrays(longer) == arrays(finished)
    assert run.load_config(longer.folder) == longer.config == other
    used: list[Any] = [record.get("mfu") for record in of_kind(longer, "train")]
    assert [share is not None for share in used] == [False] * 4 + [True] * 2
    assert 0 < used[-1] < 1
    ends = [
        checkpoint.progress(r.checkpoints, 12)["evaluations_since_best"] for r in (longer, finished)
    ]
    assert ends[0] == ends[1]  # the evaluation at step 8 is no lost patience


def test_changed_data_is_refused_by_name(tiny_config: Config, tmp_path: Path) -> None:
    sides = [Path(side) for side in tiny_config.data.dev[0].split(",")]
    copies = [shutil.copy(side, tmp_path / f"dev{i}") for i, side in enumerate(sides)]
    dev, by_loss = ",".join(map(str, copies)), {"best": "loss", "decode_every": None}
    copied = changed(tiny_config, data={"dev": (dev,)}, train={"steps": 1, **by_loss})
    train(copied, tmp_path / "r")
    for copy in copies:
        Path(copy).write_text("blue\n" * 4)
    message = r"data\.dev=.*: has changed since run .* began \(.*dev0: SHA-256 \w{12}… -> \w{12}…; "
    with pytest.raises(ValueError, match=message + r".*dev1: SHA-256"):
        train(copied, tmp_path / "r")


def test_metrics_hold_any_text(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        metrics({"kind": "evaluation", "step": step, "samples": ["a\u2028b\x85c"]})
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 3')  # cut short by a crash
    metrics.cut(1, 1)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    for line, message in ((b'{"kind": "x"}', "an object with a step"), (b"\xff", "not JSON")):
        (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line + b"\n")
        with pytest.raises(UserError, match=f"line 2: .*{message}"):
            read_metrics(tmp_path / "metrics.jsonl")


def test_a_folder_with_other_files_is_refused(tiny_config: Config, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ValueError, match=r"no config.json, so it is not a run"):
        train(tiny_config, tmp_path)


def test_a_run_without_a_whole_checkpoint_is_refused(copied: run.Run) -> None:
    for path in copied.folder.glob("checkpoints/*/manifest.json"):
        path.unlink()
    message = r"checkpoint .*manifest.json is missing, and no checkpoint"
    with pytest.raises(UserError, match=message):
        train(copied.config, copied.folder)


def begin_only(begin: Callable[..., run.Run], folder: Path) -> None:
    """Begins a run, which is killed before its first checkpoint."""
    with pytest.raises(Stop):
        begin(folder, reporters=[stop_at(0, "message")])
    assert checkpoint.steps(folder / "checkpoints") == []


def test_a_state_of_another_optimizer_is_no_damage(
    copied: run.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training would go on from an earlier checkpoint, and replace this one."""
    monkeypatch.setitem(OPTIMIZERS, "adam", lambda config, rate, params: optax.sgd(rate))
    message = r"checkpoint 12 in .*: training does not fit: opt_state/.* saved, nothing wanted"
    with pytest.raises(UserError, match=message):
        train(changed(copied.config, train={"steps": 13}), copied.folder)


@pytest.mark.long
def test_a_run_stopped_before_its_first_checkpoint_begins_with_the_same_weights(
    tiny_config: Config, finished: run.Run, tmp_path: Path
) -> None:
    begin = partial(train, tiny_config, init_from=finished.folder)
    begin_only(begin, tmp_path / "r")
    with pytest.raises(UserError, match=rf"; give --init-from={finished.folder}, or "):
        train(tiny_config, tmp_path / "r")
    moved = shutil.copytree(finished.folder, tmp_path / "moved")
    other = partial(train, tiny_config, init_from=moved)
    begin_only(other, tmp_path / "r")
    shutil.rmtree(moved / "checkpoints" / f"{finished.best_step():08d}")
    with pytest.raises(UserError, match=rf"are not those that run .* with, of {finished.folder}, "):
        other(tmp_path / "r")
    assert_same(begin(tmp_path / "r"), begin(tmp_path / "whole"))
    begin_only(partial(train, tiny_config), tmp_path / "random")
    with pytest.raises(UserError, match=r"random: .* random parameters; leave out --init-from="):
        begin(tmp_path / "random")


@pytest.mark.long
def test_weights_of_another_run_do_not_replace_those_saved_meanwhile(
    tiny_config: Config, finished: run.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process saves after this one has found no checkpoint, and before it has the lock."""

    def save_first(*arguments: Any) -> setup.Setup:
        monkeypatch.setattr(trainer, "set_up", set_up)
        train(short, tmp_path / "r", init_from=finished.folder)
        return set_up(*arguments)

    begin = partial(train, tiny_config, init_from=finished.folder)
    short = changed(tiny_config, train={"steps": 4})
    begin_only(begin, tmp_path / "r")
    monkeypatch.setattr(trainer, "set_up", save_first)
    assert arrays(begin(tmp_path / "r")) == arrays(begin(tmp_path / "whole"))


@pytest.mark.long
def test_the_start_is_evaluated_and_may_be_the_best(
    finished: run.Run, tiny_config: Config, tmp_path: Path
) -> None:
    """With the same vocabulary its parameters are those of the other run, bit for bit."""
    short = changed(tiny_config, train={"steps": 2}, optimizer={"learning_rate": 9.0})
    made = train(short, tmp_path / "r", init_from=finished.folder)
    jax.tree.map(np.testing.assert_array_equal, made.params(0), finished.params())
    evaluations = [of_kind(each, "evaluation") for each in (made, finished)]
    assert [record["step"] for record in evaluations[0]] == [0, 2]
    [wanted] = [r["sets"] for r in evaluations[1] if r["step"] == finished.best_step()]
    assert evaluations[0][0]["sets"] == wanted
    assert made.best_step() == 0
    assert checkpoint.steps(made.checkpoints) == [0, 2]
    assert made.tokenizers.source.model == finished.tokenizers.source.model
    again = partial(plan_start, short, made.folder, init_from=finished.folder)
    assert again().source is None
    with pytest.raises(UserError, match=r"r: starts with other .* --init-from with no other opt"):
        again(init_parts=["norms"])
    with pytest.raises(UserError, match="starts with random parameters; leave out --init-from="):
        plan_start(finished.config, finished.folder, init_from=made.folder)
    deeper = changed(tiny_config, model={"layers": 2, "d_ff": 16})
    message = (
        r"decide model\.layers=2: must be 1; model\.decoder_layers=2: .*; model\.d_ff=16: must"
    )
    with pytest.raises(UserError, match=rf"--init-from={finished.folder}: its .* {message}"):
        train(deeper, tmp_path / "s", init_from=finished.folder)


def test_equal_scores_are_decided_by_the_loss() -> None:
    progress, nan = Progress(), float("nan")
    scores = [(0, 9), (0, 8), (0, 8), (0, 8.5), (2, 9), (2, nan), (2, 8), (1, 1), (nan, 1), (3, 9)]
    better = [progress.improve(*map(float, each)) for each in scores]
    assert better == [True, True, False, False, True, False, True, False, False, True]
    assert Progress().improve(nan, nan)
    stored = json.loads(json.dumps(asdict(progress)))
    assert Progress(**stored) == progress

    by_loss = Progress()  # a first loss that is not finite does not stay the best
    assert [by_loss.improve(-loss, loss) for loss in (nan, 9.0, nan, 8.0)] == [1, 1, 0, 1]


def permuted(tokenizer: Tokenizer, path: Path) -> str:
    """A model of the same pieces in another order, after the special ones."""
    model: Any = sentencepiece_model_pb2
    proto = model.ModelProto.FromString(tokenizer.model)
    others = [*proto.pieces][4:]
    del proto.pieces[4:]
    proto.pieces.extend(others[i] for i in np.random.default_rng(0).permutation(len(others)))
    path.write_bytes(proto.SerializeToString())
    return str(path)


def test_a_permuted_vocabulary_gives_the_same_translations(
    finished: run.Run, tiny_config: Config, tmp_path: Path
) -> None:
    model = permuted(finished.tokenizers.source, tmp_path / "permuted.model")
    setup = prepare(changed(tiny_config, tokenizer={"models": (model,)}))
    params, lines = params_from(finished, setup)
    assert lines[1] == "embeddings: 320 pieces taken, 0 made from others, 0 dropped"
    before, after = flat(finished.params()), flat(params)
    moved = {path for path, leaf in before.items() if not np.array_equal(leaf, after[path])}
    assert moved == {"target_embedding/embedding"}
    words = ["red green", "old", "new blue small red red", "old new"]
    translator = Translator(setup.config, setup.tokenizers, params)
    wanted = Translator.load(finished.folder).stream(words)
    for one, other in zip(wanted, translator.stream(words), strict=True):
        assert one.text == other.text
        scores = [[h.score for h in each.hypotheses] for each in (one, other)]
        np.testing.assert_allclose(*scores, rtol=1e-5)


def test_new_pieces_begin_as_the_mean_of_others(
    finished: run.Run, tiny_config: Config, tmp_path: Path
) -> None:
    """On each side, and also the rows of the output and of its bias."""
    apart = changed(tiny_config, model={"tied": "none", "output_bias": True})
    draw = np.random.default_rng(0)
    like = prepare(apart).abstract_state.params
    old = jax.tree.map(lambda leaf: draw.standard_normal(leaf.shape, np.float32), like)
    source = run.create_with(old, 3, replace(finished, folder=tmp_path / "old"))
    other = {"vocabulary": 290, "joint": False, "symbols": (" redold",)}
    setup = prepare(changed(apart, tokenizer=other))
    params, lines = params_from(source, setup)
    known, target = {*pieces(finished.tokenizers.target)}, setup.tokenizers.target
    for line, side, new in zip(lines[1:], ("source", "target"), setup.tokenizers, strict=True):
        taken = len(known & {*pieces(new)})
        counts = f"{taken} pieces taken, {290 - taken} made from others, {320 - taken} dropped"
        assert line == f"{side} embeddings: {counts}"
    spelled = finished.tokenizers.target.encode("redold")
    assert len(spelled) > 1
    for path in ("target_embedding/embedding", "output", "output_bias"):
        row = flat(params)[path][target.find("▁redold")]
        wanted = flat(old)[path][spelled].mean(axis=0)
        np.testing.assert_allclose(row, wanted, rtol=1e-5, atol=1e-6)


def pieces(tokenizer: Tokenizer) -> list[str]:
    return tokenizer.pieces(range(tokenizer.size))


def test_a_part_is_taken_and_the_rest_is_random(
    finished: run.Run, tiny_config: Config, tmp_path: Path
) -> None:
    """The numbers of layers may differ, but not in what is taken."""
    deeper = changed(tiny_config, model={"decoder_layers": 2})
    begin = partial(plan_start, deeper, tmp_path / "r", init_from=finished.folder)
    parts = ("encoder", "*_embedding/*")
    start, key = begin(init_parts=parts), jax.random.key(1)
    setup = set_up(deeper, start.tokenizers, start.corpora)
    random = flat(first_state(replace(start, source=None), setup, key)[0].params)
    state, _, [line] = first_state(start, setup, key)
    taken, others = map(flat, split(state.params, parts))
    assert min(len(taken), len(others)) > 5
    for tree, wanted in ((taken, flat(finished.params())), (others, random)):
        for path, leaf in tree.items():
            np.testing.assert_array_equal(leaf, wanted[path])
            np.testing.assert_array_equal(leaf, flat(state.ema)[path])
    sizes = [sum(leaf.size for leaf in tree.values()) for tree in (taken, random)]
    origin = f"run {finished.folder}, step {finished.best_step()}"
    assert line == (
        f"parameters: {sizes[0]:,} of {sizes[1]:,} are those of {origin} "
        "(encoder, *_embedding/*); the others are random"
    )
    message = r"does not fit: decoder/layers_1/.*: nothing saved, float32.* wanted"
    with pytest.raises(UserError, match=message):
        first_state(begin(init_parts=("decoder/*",)), setup, key)
    with pytest.raises(UserError, match=r"decide model\.decoder_layers=2: must be 1"):
        begin(init_parts=("decoder",))


@pytest.mark.long
def test_another_vocabulary_is_made_if_asked_for(
    tiny_config: Config, finished: run.Run, tmp_path: Path
) -> None:
    said: list[dict[str, Any]] = []
    other = changed(tiny_config, tokenizer={"vocabulary": 300, "sampling": 0.3}, train={"steps": 1})
    begin = partial(train, other, init_from=finished.folder)
    message = r"without --new-vocabulary: .* decide tokenizer\.vocabulary=300: must be [0-9]+$"
    with pytest.raises(UserError, match=message):
        begin(tmp_path / "r")
    with pytest.raises(UserError, match="--init-parts='norm': matches no parameter; did you"):
        begin(tmp_path / "r", new_vocabulary=True, init_parts=["norm"])
    assert not (tmp_path / "r").exists()
    begin = partial(begin, new_vocabulary=True)
    begin_only(begin, tmp_path / "r")
    with pytest.raises(UserError, match="; give --init-from with --new-vocabulary, or name "):
        begin(tmp_path / "r", init_parts=["norms"])
    made = begin(tmp_path / "r", reporters=[said.append])
    assert made.tokenizers.source.size == 300
    assert any(r.get("text", "").startswith("embeddings: 300 pieces taken") for r in said)


@pytest.mark.long
def test_training_ends_by_epochs_minutes_and_patience(tiny_config: Config, tmp_path: Path) -> None:
    def reason(name: str, config: Config, **values: Any) -> str:
        said: list[dict[str, Any]] = []
        options = TrainConfig(evaluate_every=2, save_every=100, log_every=1, **values)
        train(replace(config, train=options), tmp_path / name, reporters=[said.append])
        return said[-1]["text"]

    unscored = changed(tiny_config, data={"dev": ()})
    assert "reached train.epochs=1" in reason("epochs", unscored, epochs=1)
    assert "reached train.minutes=0.001" in reason("minutes", unscored, minutes=0.001)
    assert "train.patience=1" in reason("patience", tiny_config, patience=1, steps=200)


@pytest.mark.long
def test_steps_that_are_not_finite_are_skipped(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of every third batch or so is NaN."""

    def poisoned(*arguments: Any) -> Any:
        loss = loss_fn(*arguments)

        def wrong(params: Any, batch: Batch, *rest: Any) -> Any:
            total, sums = loss(params, batch, *rest)
            return total + jnp.where(jnp.sum(batch.source) % 3 == 0, jnp.nan, 0.0), sums

        return wrong

    monkeypatch.setattr(setup, "loss_fn", poisoned)
    said: list[dict[str, Any]] = []
    unscored = changed(tiny_config, data={"dev": ()})
    whole = train(unscored, tmp_path / "whole", reporters=[said.append])
    skipped = [record["step"] for record in said if "skipped" in record.get("text", "")]
    assert 0 < len(skipped) < 9
    assert checkpoint.progress(whole.checkpoints, 12)["sums"]["skipped"] == len(skipped)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(whole.params()))
    train(changed(unscored, train={"steps": skipped[0]}), tmp_path / "parts")
    assert_same(train(unscored, tmp_path / "parts"), whole)


@pytest.mark.long
def test_pmap_trains(tiny_config: Config, tmp_path: Path) -> None:
    pmap = changed(tiny_config, execution={"executor": "pmap"}, train={"steps": 4})
    assert checkpoint.steps(train(pmap, tmp_path / "pmap").checkpoints) == [4]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_deterministic_run_resumes_bit_for_bit_on_a_gpu(
    dtype: Any, tiny_config: Config, tmp_path: Path
) -> None:
    """Without dropout of attention weights, bfloat16 uses cuDNN's attention."""
    model = {"attention_dropout": 0.0, "dtype": dtype}
    config = changed(tiny_config, model=model, execution={"deterministic": True})
    assert_resumes(config, train(config, tmp_path / "whole"), tmp_path / "r")


@pytest.mark.long
def test_a_deterministic_run_asks_the_compiler_for_it(
    tiny_config: Config, finished: run.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for its plan and for evaluation. The compiler refuses options that it does not know."""
    monkeypatch.setitem(DETERMINISTIC, "xla_no_such_option", "True")
    deterministic = changed(tiny_config, execution={"deterministic": True})
    setup, params = prepare(deterministic), finished.params()
    (dev,) = setup.dev.values()
    shape = setup.loader.shapes[0].padded(8)
    with Checkpoints(tmp_path / "checkpoints", 1) as checkpoints:
        metrics = MetricsFile(tmp_path / "metrics.jsonl")
        trainer = Trainer(setup, finished, checkpoints, metrics, (), StopRequest())
    key, batch = jax.random.key(0), next(setup.loader.batches()).batch
    state = setup.compile_init()(key)
    compilations: list[Callable[[], Any]] = [
        lambda: trainer.compute(state, shard_batch(batch, setup.mesh), key),
        lambda: trainer.apply(state, state.params, jnp.zeros(()), LossSums(jnp.ones(()), {})),
        lambda: compile_gradients(setup, shape),
        lambda: trainer.dev_scores.loss(params, dev.examples),
        lambda: trainer.dev_scores.translator.with_params(params)(["red old"]),
    ]
    for compilation in compilations:
        with pytest.raises(RuntimeError, match="No such compile option: 'xla_no_such_option'"):
            compilation()


@pytest.mark.long
def test_the_first_development_corpus_chooses_by_loss(tiny_config: Config, tmp_path: Path) -> None:
    dev = (*tiny_config.data.dev, write_pairs(tmp_path, "other", 8, 3))
    options = {"best": "loss", "evaluate_every": 3}
    trained = train(changed(tiny_config, data={"dev": dev}, train=options), tmp_path / "r")
    evaluations = of_kind(trained, "evaluation")
    assert [tuple(r["sets"]) for r in evaluations] == [dev] * 4
    losses = [r["sets"][dev[0]]["loss"] for r in evaluations]
    assert losses != [r["sets"][dev[1]]["loss"] for r in evaluations]
    lowest = [loss == min(losses[: i + 1]) for i, loss in enumerate(losses)]
    assert [r["best"] for r in evaluations] == lowest
    assert trained.best_step() == evaluations[int(np.argmin(losses))]["step"]
    assert lowest != [True, False, False, False]  # as by BLEU, which is 0 here
