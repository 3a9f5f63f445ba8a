"""A signal stops training wherever it is, and the run goes on as if nothing had happened."""

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from common import changed, wait_for
from training_process import assert_same, reference, two_processes

from tools.faults import signal_case
from tools.processes import Fault, children, finish
from transformer_jax.config import Config
from transformer_jax.runs import checkpoint, run
from transformer_jax.training import signals, validation
from transformer_jax.training.setup import prepare
from transformer_jax.training.trainer import train
from transformer_jax.training.validation import DevScores

needs_main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals reach the main thread only",
)


COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def signal_while(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function (name, n): SIGTERM arrives at the end of the n-th compilation of this program."""
    listeners: list[Any] = []

    def arrange(name: str, n: int = 1) -> None:
        count = [0]

        def listen(event: str, duration_secs: float, **about: Any) -> None:
            if event == COMPILED and about.get("fun_name") == f"jit({name})":
                count[0] += 1
                if count[0] == n:
                    os.kill(os.getpid(), signal.SIGTERM)

        listeners.append(listen)
        jax.monitoring.register_event_duration_secs_listener(listen)

    yield arrange
    for listener in listeners:
        jax.monitoring.unregister_event_duration_listener(listener)


def soon_again() -> None:
    again = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
    again.start()
    signal.raise_signal(signal.SIGTERM)
    again.join()


def at_once() -> None:
    """As from a terminal and a supervisor together. Python handles both in one go."""
    both = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, both)
    for number in both:  # not to the process, whose other threads block neither
        signal.pthread_kill(threading.get_ident(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, both)


@needs_main_thread
@pytest.mark.parametrize(("act", "first"), [(soon_again, signal.SIGTERM), (at_once, signal.SIGINT)])
def test_two_signals_are_one_request(act: Callable[[], None], first: signal.Signals) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with signals.stop_signals() as stop:
            act()
            assert (stop.signal, seen) == (first, [])
            signal.raise_signal(signal.SIGTERM)
            assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@needs_main_thread
@pytest.mark.parametrize(
    ("program", "n", "shapes", "saved"),
    [
        pytest.param("init", 1, 1, [], id="initial state"),
        pytest.param("summed_gradients", 1, 1, [1], id="first step", marks=pytest.mark.long),
        pytest.param("eval_step", 1, 1, [6], id="development loss", marks=pytest.mark.long),
        pytest.param("prefill", 1, 1, [6], id="translation", marks=pytest.mark.long),
        pytest.param("summed_gradients", 2, 2, [4], id="another shape", marks=pytest.mark.slow),
    ],
)
def test_a_signal_waits_for_the_program_that_is_compiled(
    program: str,
    n: int,
    shapes: int,
    saved: list[int],
    signal_while: Any,
    tiny_config: Config,
    finished: run.Run,
    tmp_path: Path,
) -> None:
    """And for no other: a step that was compiled runs, an evaluation is given up. All steps are
    saved, and the run goes on as if nothing had happened."""
    config = changed(tiny_config, data={"shapes": shapes}, train={"save_every": 100})
    signal_while(program, n)
    with pytest.raises(SystemExit) as caught:
        train(config, tmp_path / "r")
    assert caught.value.code == 143
    assert checkpoint.steps(tmp_path / "r" / "checkpoints") == saved
    if saved == [6]:
        assert checkpoint.progress(tmp_path / "r" / "checkpoints", 6)["evaluated"] == 0
    if saved:  # otherwise the run begins anew
        whole = finished if shapes == 1 else train(config, tmp_path / "whole")
        assert_same(train(config, tmp_path / "r"), whole)


def test_an_evaluation_is_given_up_between_batches(tiny_config: Config, finished: run.Run) -> None:
    setup, params, answers = prepare(tiny_config), finished.params(), [False, True, True]
    scores = DevScores(setup, lambda: answers.pop(0))
    (dev,) = setup.dev.values()
    assert scores.loss(params, dev.examples)["loss"] > 0  # of one batch
    with pytest.raises(validation.Cancelled):
        scores.loss(params, dev.examples)
    assert scores(params) is None
    assert not answers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "phase"),
    [
        (signal.SIGTERM, "compiling"),
        (signal.SIGINT, "decoding"),
        (signal.SIGTERM, "saving, twice"),
    ],
)
def test_a_signal_ends_a_process_and_the_run_goes_on(
    number: signal.Signals, phase: str, tiny_config: Config, finished: run.Run, tmp_path: Path
) -> None:
    """A second one ends it while it saves."""
    case = signal_case(number, phase, random.Random(0))
    assert reference(tiny_config, finished, tmp_path).interrupt(case)["mismatches"] == []


@pytest.mark.slow
def test_a_second_signal_ends_the_process_while_it_evaluates(
    tiny_config: Config, finished: run.Run, tmp_path: Path
) -> None:
    """A step that was due is saved before the programs of an evaluation are compiled."""
    often = changed(tiny_config, train={"save_every": 6})
    fault = Fault("evaluating", signals=(signal.SIGINT, signal.SIGINT))
    end = reference(often, finished, tmp_path).train(tmp_path / "r", fault)
    assert end["status"] == 128 + signal.SIGINT
    assert end["saved"] == [6]
    assert_same(train(tiny_config, tmp_path / "r"), finished)


@pytest.mark.slow
def test_a_second_signal_ends_all_processes(tiny_config: Config, tmp_path: Path) -> None:
    endless = changed(tiny_config, train={"steps": 100_000})
    process = two_processes(endless, tmp_path).start(tmp_path / "r")
    wait_for(tmp_path / "r/checkpoints/00000004", process)
    both = children(process)
    assert len(both) == 2
    os.kill(both[1], signal.SIGSTOP)  # so that the first signal cannot end them
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGTERM)
    status, error = finish(process)
    assert status == 143
    assert "error" not in error
    assert not any(Path(f"/proc/{child}").exists() for child in both)
    folder = tmp_path / "r" / "checkpoints"
    assert checkpoint.restore(folder, checkpoint.steps(folder)[-1], "weights")


@pytest.mark.slow
@pytest.mark.parametrize("compiling", [False, True])
def test_a_signal_to_every_process_is_a_single_request(
    compiling: bool, tiny_config: Config, tmp_path: Path
) -> None:
    """Supervisors send it to all processes, and the launcher passes it on. They agree on the end
    soon, though nothing is logged or evaluated, or once all have compiled the first step."""
    often: Any = dict.fromkeys(("steps", "log_every", "evaluate_every"), 100_000)
    endless = changed(tiny_config, model={"layers": 6 if compiling else 1}, train=often)
    process = two_processes(endless, tmp_path).start(tmp_path / "r")
    wait_for(tmp_path / "r/checkpoints" / ("" if compiling else "00000004"), process)
    time.sleep(3 * compiling)
    for child in children(process):
        os.kill(child, signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    status, error = finish(process)
    assert status == 143
    last = checkpoint.steps(tmp_path / "r" / "checkpoints")[-1]
    assert f"step {last}: stopped by SIGTERM" in error
