"""Searches that are kept between runs are not traced again, unless code or config differ."""

import os
import subprocess
import sys
from functools import wraps
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import ONE_DEVICE, Patch, build, tiny
from jax import export

from transformer_jax.config import DecodeConfig
from transformer_jax.decoding import exported, strategies, translator
from transformer_jax.decoding.strategies import Lines, Phases
from transformer_jax.decoding.translator import Translator
from transformer_jax.models.quantization import quantize
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.runs.run import Run

LINES = [f"{'red ' * (i % 5)}{'blue new ' * (i % 4)}old" for i in range(27)]
PHASES = {"prefill", "decode", "grow"}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The folder in which searches are kept, as if the program ran."""
    monkeypatch.setattr(exported, "enabled", True)
    monkeypatch.setattr(translator, "program_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def traced(monkeypatch: Patch) -> list[str]:
    """The names of phases, as often as they are traced."""
    names: list[str] = []
    make_phases = strategies.make_phases

    def counted(phase: Any) -> Any:
        @wraps(phase)
        def call(*arguments: Any) -> Any:
            names.append(phase.__name__)
            return phase(*arguments)

        return call

    def make(*arguments: Any) -> Phases:
        return Phases(*map(counted, make_phases(*arguments, first_length=4)))

    monkeypatch.setattr(translator, "make_phases", make)
    return names


def translations(run: Run, **changes: Any) -> list[Any]:
    """The hypotheses of a translator that has just been loaded, on the second of the devices."""
    decode = DecodeConfig(**({"beam": 2, "batch_tokens": 128, "max_ratio": 9.0} | changes))
    mesh = make_mesh(devices=jax.devices()[1:2])
    loaded = Translator.load(run.folder, decode=decode, mesh=mesh)
    return [each.hypotheses for each in loaded(LINES)]


@pytest.mark.parametrize(
    "changes", [{"n_best": 2}, pytest.param({"sample": True, "beam": 1}, marks=pytest.mark.long)]
)
def test_a_kept_search_is_not_traced(
    changes: dict[str, Any], finished: Run, kept: Path, traced: list[str], monkeypatch: Patch
) -> None:
    first = translations(finished, **changes)
    assert {*traced} == PHASES
    assert len(traced) == len([*kept.glob("*-search")])  # one for each shape
    traced.clear()
    assert translations(finished, **changes) == first
    assert traced == []
    monkeypatch.setattr(exported, "enabled", False)
    assert translations(finished, **changes) == first
    assert {*traced} == PHASES


def test_another_search_or_package_is_traced(
    finished: Run, kept: Path, traced: list[str], monkeypatch: Patch
) -> None:
    translations(finished)
    for other in ("search", "package"):
        traced.clear()
        if other == "package":
            monkeypatch.setattr(exported, "_package", lambda: ("another",))
        translations(finished, alpha=0.25)
        assert {*traced} == PHASES, other


def test_a_damaged_file_is_replaced(finished: Run, kept: Path, traced: list[str]) -> None:
    first = translations(finished)
    for number, path in enumerate(sorted(kept.glob("*-search"))):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if number % 2 else b"")
    traced.clear()
    assert translations(finished) == first
    assert {*traced} == PHASES
    traced.clear()
    assert translations(finished) == first
    assert traced == []


def test_a_file_with_another_digest_is_not_read(tmp_path: Path) -> None:
    """Decompression does not find it: what is there was never written as a whole."""
    mesh = make_mesh(devices=jax.devices()[:1])
    double = exported.Exported(lambda x: x * 2, folder=tmp_path, about="", mesh=mesh)
    assert double(jnp.ones(3)).tolist() == [2.0] * 3
    (path,) = tmp_path.iterdir()
    assert exported._read(path) is not None
    content = bytearray(exported.zlib.decompress(path.read_bytes()))
    content[-1] ^= 1
    path.write_bytes(exported.zlib.compress(content))
    assert exported._read(path) is None


@pytest.mark.parametrize(
    ("model", "decode", "lines"),
    [
        ({"self_layer": "ssru"}, {"beam": 2}, {}),
        ({"positions": "rotary", "kv_heads": 1}, {"beam": 1}, {"prefix": (2, 2)}),
        ({}, {"beam": 4, "n_best": 2}, {"phrases": (2, 1, 2)}),
        ({"labels": 2, "tied": "none"}, {"beam": 1}, {}),
        ({"weights": "int8"}, {"beam": 2}, {}),
    ],
)
def test_the_state_of_every_search_can_be_kept(
    model: dict[str, Any], decode: dict[str, Any], lines: dict[str, tuple[int, ...]]
) -> None:
    """Without this, a search is traced each time: its types must be known to JAX."""
    built, params = build(tiny(**model))
    params = quantize(params) if "weights" in model else params
    phases = strategies.make_phases([built], DecodeConfig(**decode))
    arrays = {name: np.ones(shape, np.int32) for name, shape in lines.items()}
    batch = Lines(np.ones((2, 4), np.int32), **arrays)
    prefill = export.export(jax.jit(phases.prefill))([params], batch)
    progress = jax.eval_shape(phases.prefill, [params], batch)
    search = export.export(jax.jit(phases.decode))([params], progress, np.int32(0))
    for each in (prefill, search):
        assert export.deserialize(each.serialize()).in_tree == each.in_tree


COUNT = """
import sys
import jax
from transformer_jax.cli.main import main

def count(event, seconds, fun_name="", **more):
    if event.endswith("jaxpr_trace_duration"):
        print("traced", fun_name, file=sys.stderr)

jax.monitoring.register_event_duration_secs_listener(count)
main()
"""


@pytest.mark.long
def test_the_command_keeps_searches_unless_it_imports_code(finished: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    environment = os.environ | ONE_DEVICE | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), str(tmp_path)])

    def traced(*options: str) -> set[str]:
        command = [sys.executable, "-c", COUNT, "translate", f"--run={finished.folder}", *options]
        done = subprocess.run(
            command, input="red old\n", capture_output=True, text=True, env=environment, check=True
        )
        assert done.stdout == first or not first
        outputs.append(done.stdout)
        lines = done.stderr.splitlines()
        return {line.split()[1] for line in lines if line.startswith("traced ")} & PHASES

    outputs: list[str] = []
    first = ""
    assert traced() == {"prefill", "decode"}
    first = outputs[0]
    assert traced() == set()
    assert traced("--import=mine") == {"prefill", "decode"}
