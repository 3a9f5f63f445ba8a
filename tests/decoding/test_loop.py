"""Batches of few shapes: sentences that wait for others are translated as if alone."""

from functools import partial
from typing import Any

import jax
import pytest

from transformer_jax.config import DecodeConfig
from transformer_jax.decoding import loop, strategies, translator
from transformer_jax.decoding.translator import Translator
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.runs.run import Run

LINES = [f"{'red ' * (i % 5)}{'blue new ' * (i % 4)}old" for i in range(27)]


@pytest.mark.parametrize(
    "changes",
    [
        {"beam": 2, "n_best": 2},
        pytest.param({"sample": True, "seed": 1}, marks=pytest.mark.long),
    ],
)
def test_sentences_go_on_with_others_as_if_alone(
    changes: dict[str, Any], finished: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In arrays that grow, and in batches with missing rows."""
    short = partial(strategies.make_phases, first_length=4)
    monkeypatch.setattr(translator, "make_phases", short)
    together, grown = [], []
    join, grow_state = loop._Work._together, strategies.grow_state

    def counted(work: Any, place: Any) -> Any:
        task: Any = join(work, place)
        together.append((place.position, int(task.progress.done.sum())))
        return task

    monkeypatch.setattr(loop._Work, "_together", counted)
    monkeypatch.setattr(strategies, "grow_state", lambda *a: grown.append(a[2]) or grow_state(*a))

    def outputs(tokens: int) -> list[list[tuple[int, ...]]]:
        decode = DecodeConfig(batch_tokens=tokens, max_ratio=9.0, **changes)
        mesh = make_mesh(devices=jax.devices()[:1])
        found = Translator.load(finished.folder, decode=decode, mesh=mesh)(LINES)
        return [[each.ids for each in translation.hypotheses] for translation in found]

    alone = outputs(1)
    grown.clear()
    together.clear()
    assert outputs(16 * 8) == alone
    assert {*grown} == {32}
    assert any(missing for _, missing in together)
