"""The cost of a save and of its digests is measured."""

import pytest

from tools.save_stall import measure


@pytest.mark.long
def test_a_save_is_measured() -> None:
    found = measure(turns=1, steps=2)
    assert found["step_ms"] > 0
    assert 0 < found["digest_ms"] < found["save_ms"]
    assert found["digest_share_of_save"] == found["digest_ms"] / found["save_ms"] < 0.5
