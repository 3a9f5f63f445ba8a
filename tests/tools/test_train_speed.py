"""The comparison of training speeds."""

from typing import Any

import pytest

from tools import train_speed


def test_variants_take_turns_and_pytorchs_best_way_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    def in_process(case: str, folder: str, flags: str = "", beside: bool = False) -> dict[str, Any]:
        turns.append(flags)
        peer = {"way": "eager", "tokens_per_s": 50.0, "ratio": 2.0}
        ways = [{"way": "compiled", "failed": "no compiler"}, peer, peer | {"tokens_per_s": 60.0}]
        speed = 100.0 + 50.0 * ("device_count=" in flags)
        return {"pytorch": ways} if beside else {"tokens_per_s": speed}

    monkeypatch.setattr(train_speed, "in_process", in_process)
    found = train_speed.compare("tiny", "")
    assert found["best_pytorch"]["tokens_per_s"] == 60
    assert found["variants"]["a device for each core"]["ratio"]["median"] == 1.5
    assert found["variants"]["one device"] == {
        "tokens_per_s": 100,
        "ratio": {"median": 1, "low": 1, "high": 1},
    }
    count = len(train_speed.VARIANTS)
    assert turns[1 : 1 + count] == turns[1 + count : 1 + 2 * count]
    assert len(turns) == 1 + train_speed.TURNS * count
