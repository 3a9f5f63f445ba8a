"""The scripts of deploy/ run in the project's folder, with programs in place of a cluster's."""

from pathlib import Path

import pytest
from cluster_programs import ROOT, Programs


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """The folder is the first one in PATH, and the current folder is the project's."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.chdir(ROOT)
    return Programs(folder)
