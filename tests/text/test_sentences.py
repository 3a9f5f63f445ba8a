"""Long lines are split where sentences, clauses and words end, and no character is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax.text.sentences import split


def within(limit: int, text: str) -> list[str]:
    return split(text, lambda part: len(part) <= limit)


@pytest.mark.parametrize(
    ("parts", "limit"),
    [
        (["One two.", " Three 3.5 four!", " “Five?”", " Six… ", "Seven"], 20),
        (["他来了。", "“你好！”", "我说？", "好"], 8),
        (["هل أنت هنا؟", " نعم۔", " جيد."], 12),
        (["राम आया।", " सीता गई॥", " ठीक"], 10),
        (["Ա բ։", " Գ դ։"], 6),
    ],
)
def test_sentences_are_parts(parts: list[str], limit: int) -> None:
    joined = "".join(parts)
    found = within(limit, joined)
    assert "".join(found) == joined
    assert [part.strip() for part in found] == [part.strip() for part in parts]
    assert within(len(joined), joined) == [joined]


@pytest.mark.parametrize(
    ("parts", "limit"),
    [
        (["one two, three", "; four five, six"], 16),
        (["一二三四，", "五六七八"], 6),
        (["one two three", " four five"], 15),
        (["ab" * 5, "ab" * 5], 10),
        (["กี" * 3, "กี" * 3], 6),  # a letter keeps its vowel sign
    ],
)
def test_sentences_are_halved_at_the_best_kind_of_place(parts: list[str], limit: int) -> None:
    sentence = "".join(parts)
    found = within(limit, sentence)
    assert "".join(found) == sentence
    assert len(found) == 2
    assert all(len(part) <= limit for part in found)
    if "," in sentence:
        assert found[0].endswith((",", ";", "，"))


@given(
    st.text(st.sampled_from("ab .!?,。，；…\u0e35\u3000\U0001f600'”"), max_size=60),
    st.integers(1, 9),
)
def test_nothing_is_lost(text: str, limit: int) -> None:
    parts = within(limit, text)
    assert "".join(parts) == text
    assert all(len(part) <= limit for part in parts)


def test_what_never_fits_is_split_to_characters() -> None:
    assert split("ab. c", lambda _: False) == list("ab. c")
