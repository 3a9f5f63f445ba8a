"""CONTRIBUTING.md leads to files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def test_the_files_named_for_each_question_exist() -> None:
    table = CONTRIBUTING.split("| --- | --- |\n")[1].split("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()]
    assert rows
    for question, answer in rows:
        files = re.findall(r"`([\w./]+/[\w./]*)`", answer)
        assert files, question
        for file in files:
            assert (ROOT / file).exists(), (question, file)


def test_other_modules_that_are_named_exist() -> None:
    for path in re.findall(r"`(\w+/\w+\.py)`", CONTRIBUTING):
        assert (ROOT / "transformer_jax" / path).exists() or (ROOT / path).exists(), path
