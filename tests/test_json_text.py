"""JSON text that Python's parser takes, and text that it does not."""

from __future__ import annotations

import pytest

from transformer_jax.errors import UserError
from transformer_jax.json_text import json_digest, parse_json


@pytest.mark.parametrize("text", ['{"a": [1, "ö"]}', '{"a": [1, "ö"]}'.encode()])
def test_values_are_parsed(text: str | bytes) -> None:
    assert parse_json(text) == {"a": [1, "ö"]}


def test_bytes_may_begin_with_a_byte_order_mark() -> None:
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]


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
