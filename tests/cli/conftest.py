"""Keeps the tests of the command line out of the user's caches."""

import signal
from collections.abc import Iterator

import pytest

from transformer_jax.cli import common


@pytest.fixture(autouse=True)
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The tests keep compiled programs and corpora of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(common, "cache_programs", lambda: None)


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """A command that is called by other code leaves it the interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
