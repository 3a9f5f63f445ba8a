"""Keeps the tests of the command line out of the user's caches, and of their signals."""

import pytest

from transformer_jax.cli import common


@pytest.fixture(autouse=True)
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The tests keep compiled programs and corpora of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(common, "cache_programs", lambda: None)
    monkeypatch.setattr(common, "end_at_interrupt", lambda: None)
