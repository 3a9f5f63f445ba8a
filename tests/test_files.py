"""Files appear whole or not at all."""

from pathlib import Path

import pytest

from transformer_jax.files import write_whole


def test_a_file_is_replaced_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with write_whole(path) as file:
        file.write("näw")
        assert path.read_text("utf-8") == "old"
    assert path.read_text("utf-8") == "näw"
    assert [*tmp_path.iterdir()] == [path]


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), write_whole(path) as file:
        file.write("new")
        raise RuntimeError
    assert path.read_text("utf-8") == "old"
    assert [*tmp_path.iterdir()] == [path]
