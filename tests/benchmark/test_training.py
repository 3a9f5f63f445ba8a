"""Training steps are timed by part, beside PyTorch's."""

import contextlib
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from common import error_line, tiny

from transformer_jax.benchmark import pytorch, timing, training
from transformer_jax.benchmark.training import full_rows, measure, real_text
from transformer_jax.cli.bench_train import table
from transformer_jax.config import Config, TokenizerConfig
from transformer_jax.data.buckets import Shape
from transformer_jax.special_ids import PAD

CONFIG = Config(model=tiny(), tokenizer=TokenizerConfig(vocabulary=320))
TEXT = CONFIG.changed(
    model={"max_length": 64}, data={"train": ("grammar:test",), "batch_tokens": 512}
)


def fake_workers(seconds: float) -> Any:
    """Peers without processes: one makes steps in this time, the other fails."""
    loaded: list[Any] = []

    def ask(method: str, *arguments: Any) -> Any:
        loaded.append(arguments)
        return {"version": "1"} if method == "load" else seconds

    def fail(method: str, *arguments: Any) -> Any:
        raise RuntimeError("no compiler")

    return lambda platform, peer: contextlib.nullcontext({"tuned": ask, "default": fail})


@pytest.mark.long
def test_full_rows_are_measured_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch, "workers", fake_workers(1e6))
    monkeypatch.setattr(timing, "SAMPLE_S", 0.0)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # other tests use what is in them
    work = full_rows(CONFIG, Shape(8, 6, 5))
    record = measure(work, samples=2)
    assert (record["tokens"], record["fill"]) == (40, 1.0)
    assert record["forward_s"] > 0
    assert record["step"]["tokens_per_s"] == pytest.approx(40 / record["step"]["median_s"])
    assert record["matmuls_s"] is None  # there are eight devices
    assert 0 < training._seconds_of_matmuls(work) < 1
    eager, failed, compiled, _ = record["pytorch"]
    assert (eager["way"], compiled["way"]) == ("eager", "compiled")
    assert eager["tokens_per_s"] == 40 / 1e6
    assert eager["ratio"] > 100  # its steps take 10^6 seconds
    assert failed["failed"] == "no compiler"
    shown = "\n".join(table(record))
    assert "8x6x5" in shown
    assert "PyTorch, eager, default: failed: no compiler" in shown
    assert "not installed" in "\n".join(table(record | {"pytorch": []}))


def test_peers_pass_over_as_many_tokens_of_the_same_text(tmp_path: Path) -> None:
    work = real_text(TEXT.changed(data={"cache": str(tmp_path)}), 4)
    assert work.examples is not None
    known = {tuple(work.examples.pair(i)[1].tolist()) for i in range(len(work.examples))}
    tokens, _ = training.count_tokens(work.batches)
    fill = 0.0
    for bucketed in (False, True):
        batches = [*training._peer_batches(work.examples, TEXT, tokens, bucketed)]
        count, slots = training.count_tokens(batches)
        assert tokens <= count < tokens + 2 * TEXT.data.batch_tokens
        for batch in batches:
            assert {tuple(ids[ids != PAD].tolist()) for ids in batch.target_out} <= known
            assert bucketed <= (batch.target_out.size <= TEXT.data.batch_tokens)
            there = batch.target_out[:, 1:] != PAD
            assert np.array_equal(batch.target_in[:, 1:][there], batch.target_out[:, :-1][there])
        assert count / slots > fill
        fill = count / slots


@pytest.mark.slow
def test_pytorch_is_timed_in_the_same_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed (the extra `peers`)")
    monkeypatch.delitem(pytorch.ALLOCATORS, "default")
    for work in (full_rows(CONFIG, Shape(8, 6, 6)), real_text(TEXT, 2)):
        record = measure(work, samples=2)
        eager = [peer for peer in record["pytorch"] if peer["way"] != "compiled"]
        assert all(peer["ratio"] > 0 and peer["threads"] >= 1 for peer in eager), eager
        assert {peer["parameters"] for peer in eager} == {eager[0]["parameters"]}


BAD = {
    "--preset=tiny --rows=0": "--rows=0: must be at least 1",
    "--preset=tiny --config=quickstart": "--preset=tiny: in place of --config; give one of them",
    "--preset=huge": "invalid choice 'huge'",
    "": "--config: name a config file, or a config such as quickstart",
    "--preset=tiny --config.model.layers=1 --length=90000": (
        r"--rows=128 --length=90000: a step needs [\d,]+ bytes of [\d,]+; give fewer rows, or"
    ),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_options_are_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(BAD[words], error_line(["bench", "train", *words.split()], capsys))
