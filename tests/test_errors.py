"""Text that is printed does not control the terminal."""

import pytest

from transformer_jax.errors import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Schöne Grüße, 東京 \u200d \xa0!", "Schöne Grüße, 東京 \u200d \xa0!"),
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        ("a\tb\r\nc\u2028\x85", r"a\tb\r\nc\u2028\x85"),
        ("\udc80", r"\udc80"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
