"""The cost of a save and of its digests is measured."""

from pathlib import Path

import pytest

from tools.save_stall import save_stall


@pytest.mark.long
def test_a_save_is_measured(tmp_path: Path) -> None:
    found = save_stall(tmp_path, turns=1, steps=2)
    assert found["step_ms"] > 0
    assert 0 < found["digest_ms"] < found["save_ms"]
    assert 0 < found["digest_share_of_save"] < 0.5
