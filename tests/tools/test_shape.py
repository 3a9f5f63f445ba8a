"""What `make shape` counts."""

from tools.shape import code_lines, file_count, sizes, ways

TEXT = '''"""A docstring
of two lines."""

import os  # a comment with code

LIMIT = 3
"""A docstring of a constant."""


def f() -> str:
    """A docstring."""
    # a comment
    return """
    text
    """
'''


def test_blanks_comments_and_docstrings_are_no_code() -> None:
    assert code_lines(TEXT) == 6


def test_the_parts_of_the_package_add_up_to_it() -> None:
    (_, package), *others = sizes()
    parts = [count for name, count in others if name.startswith(" ")]
    assert package == sum(parts)
    assert [name for name, _ in others[len(parts) :]] == ["tools", "tests"]


def test_the_ways_lead_from_training_to_the_scores_and_from_translation_to_the_top_k() -> None:
    found = ways()
    assert found["train"][0] == "training/trainer.py:train"
    assert "training/step.py:train_step" in found["train"]
    assert found["train"][-len(found["model"]) :] == found["model"]
    assert found["model"][0] == "models/transformer.py:Transformer.__call__"
    assert found["model"][-1].startswith("attention/scores.py:")
    assert found["translate"][0] == "decoding/translator.py:Translator.translate"
    assert found["translate"][-1].startswith("decoding/top_k.py:")
    assert file_count(found["model"]) < len(found["model"]) < len(found["train"])
