"""The training loop of docs/own_loop.md is the same loop on any devices."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tools.common import config_file
from transformer_jax.config import Config, MeshConfig

PAGE = (Path(__file__).parents[2] / "docs" / "own_loop.md").read_text("utf-8")
(PROGRAM,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.mark.long
@pytest.mark.usefixtures("small_arrays_are_split")
def test_losses_do_not_depend_on_the_devices(
    tiny_config: Config, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout and subword sampling are on."""
    devices = jax.devices()

    def run(mesh: MeshConfig, count: int) -> Any:
        monkeypatch.setattr(jax, "devices", lambda *_: devices[:count])
        config_file(replace(tiny_config, mesh=mesh), here / "configs" / "quickstart.py")
        space: dict[str, Any] = {}
        exec(compile(PROGRAM, "own_loop.py", "exec"), space)
        assert space["mesh"].size == count
        return space

    (here / "configs").mkdir()
    one, eight = run(MeshConfig(), 1), run(MeshConfig(data=2, fsdp=4), 8)
    leaf = eight["state"].params["target_embedding"]["embedding"]
    assert not leaf.sharding.is_fully_replicated
    np.testing.assert_allclose(one["losses"], eight["losses"], rtol=1e-5)
    assert one["losses"][-1] < one["losses"][0]
    lines = ["red old", "blue"]
    assert one["translator"](lines) == eight["translator"](lines)
