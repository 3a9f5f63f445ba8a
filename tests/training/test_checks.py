"""`transformer-jax check` names what is broken in code of one's own, and nothing else."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from broken import LAYERS
from common import Patch, printed, tiny

from tools.common import config_file
from transformer_jax.cli.main import main
from transformer_jax.config import AttentionConfig, Config, TokenizerConfig
from transformer_jax.text.tokenizer import train as train_tokenizers
from transformer_jax.training import checks
from transformer_jax.training.checks import CHECKS, Subject
from transformer_jax.types import Batch

OF_MODEL = {"decoding with caches", "what positions see", "padding", "packing", "accumulation"}


def failures(config: Config, folder: Path, names: set[str]) -> set[str]:
    """The checks that fail."""
    subject, failed = Subject.of(config, None, (), folder), set()
    for name in names:
        function, limits = CHECKS[name]
        failed |= set() if function(subject) <= limits[config.model.dtype] else {name}
    return failed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "wanted"),
    [
        ("Mean", set()),
        ("ssru", set()),
        ("LosesItsState", {"decoding with caches"}),
        ("ForgetsWhenItGrows", {"decoding with caches"}),
        ("AveragesItsLoss", {"accumulation"}),
        ("SeesTheNext", {"decoding with caches", "what positions see", "padding"}),
    ],
)
def test_broken_layers(layer: str, wanted: set[str], tiny_config: Config, tmp_path: Path) -> None:
    assert layer in {"ssru", *(each.__name__ for each in LAYERS)}
    config = replace(tiny_config, model=tiny(self_layer=layer, decoder_start_id=None))
    assert failures(config, tmp_path, OF_MODEL - {"packing"}) == wanted


@pytest.mark.slow
def test_a_broken_kind_is_named(tiny_config: Config, tmp_path: Path) -> None:
    attention = AttentionConfig(kind="causal_by_two")
    config = replace(tiny_config, model=tiny(decoder_attention=attention))
    wanted = {"decoding with caches", "what positions see", "padding", "packing"}
    assert failures(config, tmp_path, OF_MODEL) == wanted


def test_a_broken_kernel_is_named(tiny_config: Config, tmp_path: Path) -> None:
    execution = replace(tiny_config.execution, kernel="broken:sees_padding")
    config = replace(tiny_config, model=tiny(), execution=execution)
    names = {"what positions see", "padding"}
    assert failures(config, tmp_path, names) == names


@pytest.mark.slow
def test_the_command(tiny_config: Config, tmp_path: Path, monkeypatch: Patch, capsys: Any) -> None:
    """A loss that is averaged on each device is found on several devices, in another process."""
    monkeypatch.chdir(Path(__file__).parents[1])  # where the other process finds the module, too
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    path = config_file(replace(tiny_config, model=tiny()), tmp_path / "config.py")
    command = ["check", f"--config={path}", "--import=broken"]
    lines = printed(command, capsys).splitlines()
    assert [line[:10].strip() for line in lines] == ["ok"] * len(CHECKS)
    broken = ["--config.model.self-layer=AveragesItsLoss", "--config.execution.executor=pmap"]
    with pytest.raises(SystemExit, match="1"):
        main([*command, *broken, "--config.data.packing=False"])
    lines = capsys.readouterr().out.splitlines()
    failed = {line[10:30].strip() for line in lines if line.startswith("FAILED")}
    assert failed == {"accumulation", "several devices"}
    assert [line for line in lines if line.startswith("left out  packing")]


def _wait(config: Config, sizes: tuple[int, int], modules: tuple[str], batch: Batch) -> None:
    started = Path(*modules)
    started.touch()
    time.sleep(20)
    started.unlink()


@pytest.mark.long
def test_an_interrupt_ends_the_process_of_several_devices(
    tiny_config: Config, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(checks, "_compare_devices", _wait)
    started = tmp_path / "started"
    config = replace(tiny_config, model=tiny())
    subject = Subject.of(config, None, (str(started),), tmp_path)

    def interrupt() -> None:
        while not started.exists():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        CHECKS["several devices"][0](subject)
    assert started.exists()  # the process was not waited for


def test_a_tokenizer_that_loses_text_is_named(tiny_config: Config, tmp_path: Path) -> None:
    config = replace(tiny_config, model=tiny())
    subject = Subject.of(config, None, (), tmp_path)
    assert CHECKS["tokenizing"][0](subject) == 0
    other = [[(f"{source} €", target) for source, target in subject.lines[0]]]
    lossy = train_tokenizers(subject.lines[0], TokenizerConfig(kind="word", vocabulary=300))
    changed = replace(subject, lines=other, tokenizers=lossy)
    assert CHECKS["tokenizing"][0](changed) == 0.5
