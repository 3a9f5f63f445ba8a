"""Files appear whole or not at all, and JSON is parsed or refused in one line."""

import os
import tempfile
from pathlib import Path

import pytest

from transformer_jax.errors import UserError
from transformer_jax.files import cache_folder, json_digest, parse_json, replacing, write_whole


def test_a_file_is_replaced_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    write_whole(path, "näw")
    assert path.read_text("utf-8") == "näw"
    assert [*tmp_path.iterdir()] == [path]


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("new")
        raise RuntimeError
    assert path.read_text("utf-8") == "old"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("text", ['["ö"]', '["ö"]'.encode(), b"\xef\xbb\xbf" + '["ö"]'.encode()])
def test_values_are_parsed(text: str | bytes) -> None:
    assert parse_json(text) == ["ö"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", r"^not JSON \(Expecting property name"),
        (b'["\xff"]', r"^not JSON \(byte 3 is not UTF-8\)$"),
        ("[" * 100_000, r"^not JSON that can be read \(nested too deeply\)$"),
        ("9" * 5_000, r"^not JSON that can be read \(an integer has too many digits\)$"),
    ],
)
def test_other_texts_are_errors_of_the_user(text: str | bytes, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_json(text)


def test_the_digest_depends_on_the_value_alone() -> None:
    digest = json_digest({"a": [1.0, "ü"], "b": None})
    assert digest == json_digest(parse_json(' {"b": null, "a": [1.0,\n"ü"]}'))
    assert digest != json_digest({"a": [1.5, "ü"], "b": None})


def test_users_without_a_home_cache_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = tmp_path / f"transformer_jax-{os.geteuid()}"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    assert cache_folder("corpora") == tmp_path / "missing/.cache/transformer_jax/corpora"
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and access(path, mode))
    assert cache_folder("corpora") == private / "corpora"
    assert private.stat().st_mode & 0o777 == 0o700
    private.chmod(0o777)
    with pytest.raises(UserError, match="others can write to it; name a folder in XDG_CACHE_HOME"):
        cache_folder("corpora")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no such user
    private.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    assert cache_folder("corpora") == private / "corpora"
