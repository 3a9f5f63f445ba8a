"""Many lines through `translate`."""

from pathlib import Path

import pytest

from tools.million_lines import translate
from transformer_jax.runs.run import Run


@pytest.mark.long
def test_memory_does_not_grow_with_the_lines(finished: Run) -> None:
    found = translate(Path(finished.folder), 60_000, (20_000, 60_000))
    assert found["translated"] == 60_000
    first, last = found["peak_mib"].values()
    assert 100 < last < 1.2 * first
