"""The table of docs/decoding.md names every field of the search."""

import dataclasses
import re
from pathlib import Path

from transformer_jax.config import DecodeConfig

TEXT = (Path(__file__).parents[2] / "docs" / "decoding.md").read_text("utf-8")


def test_the_guide_names_every_field_of_the_search() -> None:
    fields = {field.name for field in dataclasses.fields(DecodeConfig)} - {"batch_tokens"}
    named = {
        name
        for names in re.findall(r"^\| (`.*?) \|", TEXT, re.M)
        for name in re.findall(r"`(\w+)", names)
    }
    assert fields <= named
