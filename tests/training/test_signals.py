"""A signal stops training wherever it is, and the run goes on as if nothing had happened."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from training_process import WHILE_SAVING, assert_same, begin, wait_for

from transformer_jax.config import Config
from transformer_jax.runs import checkpoint, run
from transformer_jax.training import setup, signals
from transformer_jax.training.trainer import train

needs_main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals reach the main thread only",
)


@pytest.fixture
def stuck_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function (n): the n-th compilation from now on sends SIGTERM to this process, and lasts
    until the end of the test, or, if nobody gives it up, for 100 seconds and fails the test."""
    released, count, compile = threading.Event(), [0], jax.stages.Lowered.compile
    given_up: list[bool] = []

    def stuck(n: int) -> None:
        def compile_or_wait(self: Any, *arguments: Any) -> Any:
            count[0] += 1
            if count[0] == n:
                os.kill(os.getpid(), signal.SIGTERM)
                given_up.append(released.wait(100))
            return compile(self, *arguments)

        monkeypatch.setattr(jax.stages.Lowered, "compile", compile_or_wait)

    yield stuck
    released.set()
    for thread in threading.enumerate():
        if thread.name == "compile":
            thread.join()
    assert all(given_up)


@needs_main_thread
def test_a_signal_that_arrives_twice_is_a_single_request() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with signals.stop_signals() as stop:
            again = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
            again.start()
            signal.raise_signal(signal.SIGTERM)
            again.join()
            assert (stop.signal, seen) == (signal.SIGTERM, [])
            signal.raise_signal(signal.SIGTERM)
            assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@needs_main_thread
def test_two_signals_that_python_sees_at_once_are_a_single_request() -> None:
    """As from a terminal and a supervisor together. Python handles both in one go."""
    both, seen = (signal.SIGINT, signal.SIGTERM), []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with signals.stop_signals() as stop:
            signal.pthread_sigmask(signal.SIG_BLOCK, both)
            for number in both:  # not to the process, whose other threads block neither
                signal.pthread_kill(threading.get_ident(), number)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
            assert (stop.signal, seen) == (signal.SIGINT, [])
            signal.raise_signal(signal.SIGTERM)
            assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@needs_main_thread
@pytest.mark.parametrize(
    ("n", "shapes", "saved"),
    [
        pytest.param(1, 1, None, id="initial state"),
        pytest.param(2, 1, [], id="first step"),
        pytest.param(3, 1, [6], id="development loss", marks=pytest.mark.long),
        pytest.param(4, 1, [6], id="translation", marks=pytest.mark.long),
        pytest.param(3, 2, [3], id="step of another shape", marks=pytest.mark.long),
    ],
)
def test_a_signal_stops_compilation_at_once(
    n: int,
    shapes: int,
    saved: list[int] | None,
    stuck_at: Any,
    tiny_config: Config,
    finished: run.Run,
    tmp_path: Path,
) -> None:
    """It saves the steps that are not saved, and nothing where there is none."""
    config = replace(
        tiny_config,
        data=replace(tiny_config.data, shapes=shapes),
        train=replace(tiny_config.train, save_every=100),
    )
    stuck_at(n)
    with pytest.raises(SystemExit) as caught:
        train(config, tmp_path / "r")
    assert caught.value.code == 143
    assert (tmp_path / "r").exists() == (saved is not None)
    steps = checkpoint.steps(tmp_path / "r" / "checkpoints")
    assert steps == (saved or [])
    if n > 2:
        whole = finished if shapes == 1 else train(config, tmp_path / "whole")
        assert_same(train(config, tmp_path / "r"), whole)


@needs_main_thread
def test_a_signal_stops_tracing_at_once(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python code, which runs until it is given up, as compilation does."""
    released, given_up = threading.Event(), []

    def stuck(*arguments: Any) -> Any:
        def loss(*_: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            given_up.append(released.wait(100))
            raise ValueError

        return loss

    monkeypatch.setattr(setup, "loss_fn", stuck)
    with pytest.raises(SystemExit) as caught:
        train(tiny_config, tmp_path / "r")
    assert caught.value.code == 143
    released.set()
    for thread in threading.enumerate():
        if thread.name == "compile":
            thread.join()
    assert given_up == [True]


WHILE_COMPILING = """
import os, pathlib, jax
compile = jax.stages.Lowered.compile
def say(self, *arguments):
    while "train_step" in self.as_text()[:200]:
        pathlib.Path(os.environ["NOW"]).touch()
        compile(self, *arguments)
    return compile(self, *arguments)
jax.stages.Lowered.compile = say
"""
"""Makes a file once XLA compiles the training step, which it does again and again."""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_ends_while_xla_compiles(
    number: signal.Signals, tiny_config: Config, tmp_path: Path
) -> None:
    """XLA itself goes on, and would crash if Python cleaned up."""
    deep = replace(tiny_config, model=replace(tiny_config.model, layers=6))
    process, there = begin(deep, tmp_path / "r", program=WHILE_COMPILING)
    wait_for(there, process)
    time.sleep(1)
    process.send_signal(number)
    _, error = process.communicate(timeout=100)
    assert process.returncode == 128 + number
    assert f"step 0: stopped by {number.name}; the same command continues" in error
    assert checkpoint.steps(tmp_path / "r" / "checkpoints") == []


@pytest.mark.long
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_process_while_it_saves(
    second: signal.Signals, tiny_config: Config, finished: run.Run, tmp_path: Path
) -> None:
    process, there = begin(tiny_config, tmp_path / "r", program=WHILE_SAVING)
    wait_for(there, process)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):  # the first one waits for the checkpoint
        process.wait(2)
    process.send_signal(second)
    process.communicate(timeout=100)
    assert process.returncode == -second
    assert checkpoint.steps(tmp_path / "r" / "checkpoints") == [4, 6]
    assert_same(train(tiny_config, tmp_path / "r"), finished)


@pytest.mark.long
def test_a_second_signal_ends_all_processes(tiny_config: Config, tmp_path: Path) -> None:
    endless = replace(tiny_config, train=replace(tiny_config.train, steps=100_000))
    process, _ = begin(endless, tmp_path / "r", "--processes=2")
    wait_for(tmp_path / "r/checkpoints/00000004", process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGSTOP)  # so that the first signal cannot end them
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=100)
    assert process.returncode == 143
    assert "error" not in error
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    folder = tmp_path / "r" / "checkpoints"
    assert checkpoint.restore(folder, checkpoint.steps(folder)[-1], "weights")


@pytest.mark.long
def test_a_signal_to_every_process_is_a_single_request(tiny_config: Config, tmp_path: Path) -> None:
    """Supervisors send it to all processes, and the launcher passes it on. They agree on the end
    soon, though nothing is logged or evaluated."""
    often: Any = dict.fromkeys(("steps", "log_every", "evaluate_every"), 100_000)
    endless = replace(tiny_config, train=replace(tiny_config.train, **often))
    process, _ = begin(endless, tmp_path / "r", "--processes=2")
    wait_for(tmp_path / "r/checkpoints/00000004", process)
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(child), signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=100)
    assert process.returncode == 143
    last = checkpoint.steps(tmp_path / "r" / "checkpoints")[-1]
    assert f"step {last}: stopped by SIGTERM" in error


@pytest.mark.long
def test_processes_end_together_while_xla_compiles(tiny_config: Config, tmp_path: Path) -> None:
    """Or trace, before the first step."""
    deep = replace(tiny_config, model=replace(tiny_config.model, layers=6))
    process, _ = begin(deep, tmp_path / "r", "--processes=2")
    wait_for(tmp_path / "r/checkpoints", process)
    time.sleep(3)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=100)
    assert process.returncode == 143
    assert "step 0: stopped by SIGTERM" in error
