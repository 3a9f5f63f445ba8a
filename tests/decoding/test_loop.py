"""Batches of few shapes: merged sentences are translated as if alone, and searches cancelled."""

import itertools
import threading
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from common import Patch

from transformer_jax.config import DecodeConfig
from transformer_jax.decoding import ensemble, loop, strategies, translator
from transformer_jax.decoding.translator import Translator
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.runs.run import Run
from transformer_jax.training import validation

LINES = [f"{'red ' * (i % 5)}{'blue new ' * (i % 4)}old" for i in range(27)]


def translator_of(run: Run, tokens: int, **changes: Any) -> Translator:
    """A translator on one device, with batches of some tokens."""
    mesh = make_mesh(devices=jax.devices()[:1])
    decode = DecodeConfig(batch_tokens=tokens, max_ratio=9.0, **changes)
    return Translator.load(run.folder, decode=decode, mesh=mesh)


@pytest.fixture
def merged(monkeypatch: Patch) -> list[tuple[int, int]]:
    """The position of each merged batch, and the number of its rows that are missing."""
    resume, seen = loop.Loop._resume, []

    def counted(search: Any, job: Any) -> Any:
        progress = resume(search, job)
        seen.append((job.bucket.position, int(np.sum(progress.done))))
        return progress

    monkeypatch.setattr(loop.Loop, "_resume", counted)
    monkeypatch.setattr(translator, "make_phases", partial(strategies.make_phases, first_length=4))
    return seen


@pytest.mark.parametrize("on_host", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("tokens", "changes"),
    [
        (128, {"beam": 2, "n_best": 2}),
        pytest.param(256, {"beam": 1}, marks=pytest.mark.long),
        pytest.param(128, {"sample": True, "seed": 1}, marks=pytest.mark.long),
    ],
)
def test_merged_sentences_are_translated_as_if_alone(
    on_host: bool, tokens: int, changes: Any, finished: Run, merged: list[Any], monkeypatch: Patch
) -> None:
    """In arrays that grow, and in batches with missing rows."""
    begin = loop.Loop.__post_init__

    def begin_there(self: loop.Loop) -> None:
        begin(self)
        self._on_host = on_host

    monkeypatch.setattr(loop.Loop, "__post_init__", begin_there)
    grown, grow_state = [], ensemble.grow_state
    monkeypatch.setattr(ensemble, "grow_state", lambda *a: grown.append(a[2]) or grow_state(*a))

    def outputs(tokens: int) -> list[list[tuple[int, ...]]]:
        translations = translator_of(finished, tokens, **changes)(LINES)
        return [[each.ids for each in translation.hypotheses] for translation in translations]

    alone = outputs(1)
    grown.clear()
    merged.clear()
    assert outputs(tokens) == alone
    assert {*grown} == {32}
    assert any(missing for _, missing in merged)


@pytest.mark.long
def test_batches_with_and_without_prefixes_are_merged_apart(
    finished: Run, merged: list[tuple[int, int]]
) -> None:
    prefixes = ["neu" if i % 4 == 1 else "" for i in range(len(LINES))]
    order = sorted(range(len(LINES)), key=lambda i: len(LINES[i]))
    lines, prefixes = [LINES[i] for i in order], [prefixes[i] for i in order]

    def texts(tokens: int) -> list[str]:
        return [str(t) for t in translator_of(finished, tokens, beam=2).stream(lines, prefixes)]

    alone = texts(1)
    merged.clear()
    assert texts(16 * 4) == alone
    assert merged


def test_threads_compile_each_program_once(finished: Run, monkeypatch: Patch) -> None:
    """The threads that need the same one wait for it."""
    traced: Counter[Any] = Counter()
    make_phases, both = strategies.make_phases, threading.Barrier(2, timeout=60)

    def counted(*arguments: Any) -> strategies.Phases:
        phases = make_phases(*arguments)

        def prefill(params: Any, lines: Any) -> Any:
            traced[lines.source.shape] += 1
            return phases.prefill(params, lines)

        return phases._replace(prefill=prefill)

    monkeypatch.setattr(translator, "make_phases", counted)
    one = translator_of(finished, 16 * 8, beam=2)
    phases = one._phases

    def prefill(*arguments: Any) -> Any:
        if not traced:
            both.wait()
        return phases.prefill(*arguments)

    one._phases = phases._replace(prefill=prefill)
    one(["red blue"] * 40)
    assert [*traced.values()] == [1]


def test_a_search_is_cancelled_between_two_programs(finished: Run) -> None:
    """In the thread that calls, which asks before each program: one device needs no other."""
    asked: list[threading.Thread] = []
    after = 3

    def cancelled() -> bool:
        asked.append(threading.current_thread())
        return len(asked) > after

    mesh = make_mesh(devices=jax.devices()[:1])
    decode = DecodeConfig(beam=2, batch_tokens=16 * 8)
    one = Translator.load(finished.folder, decode=decode, mesh=mesh, cancelled=cancelled)
    with pytest.raises(loop.Cancelled):
        one(LINES)
    assert asked == [threading.current_thread()] * 4
    after = 1000
    assert one(LINES) == Translator.load(finished.folder, decode=decode, mesh=mesh)(LINES)


def test_speed_is_measured_without_compilation(finished: Run, monkeypatch: Patch) -> None:
    loaded = translator_of(finished, 128, beam=2)
    loaded(LINES)
    compiling = loaded.compiling
    assert compiling > 0
    loaded(LINES[::-1])
    assert loaded.compiling == compiling
    assert loaded.with_search(DecodeConfig(beam=1)).compiling == 0

    clock = itertools.count(0, 10)  # seconds, 8 of which are compilation

    def slow(self: Translator, lines: list[str], **_: Any) -> list[str]:
        self.compiling += 8
        return lines

    monkeypatch.setattr(Translator, "stream", slow)
    fake = SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr(validation, "time", fake)
    (scored,) = validation.evaluate(loaded, finished.config.data.dev)
    assert scored.scores["sentences_per_s"] == len(scored.outputs) / 2


def test_an_interrupt_waits_for_no_program(finished: Run, monkeypatch: Patch) -> None:
    """Threads run programs meanwhile, and begin no other."""
    one = translator_of(finished, 64, beam=2)
    release, began, calls = threading.Event(), threading.Event(), []

    def waiting(*arguments: Any) -> Any:
        calls.append(arguments)
        began.set()
        release.wait(60)
        raise AssertionError("of a thread to which nobody listens")

    def interrupted(threads: Any) -> Any:
        began.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(one, "_phases", one._phases._replace(prefill=waiting))
    monkeypatch.setattr(loop, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one(LINES)
    assert not release.is_set()
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("search"):
            thread.join(60)
    assert len(calls) <= translator.THREADS
