"""The pictures of docs/attention.md are those that are drawn. (Its code runs in test_pages.py.)"""

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot

from tools import pictures

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "attention.md").read_text("utf-8")


def split(svg: Path) -> tuple[str, list[np.ndarray]]:
    """A picture's lines and text, and the pixels of its images."""
    image = r'data:image/png;base64,\s*([^"]+)"'
    text = svg.read_text("utf-8")
    pixels = map(base64.b64decode, re.findall(image, text))
    return re.sub(image, "", text), [pyplot.imread(io.BytesIO(each)) for each in pixels]


@pytest.mark.long
def test_the_pictures_are_those_that_are_drawn(tmp_path: Path) -> None:
    """`make pictures` draws them. Images may differ by rounding, all else by nothing."""
    pictures.draw(tmp_path)
    names = sorted(path.name for path in DOCS.glob("*.svg"))
    assert names == sorted(path.name for path in tmp_path.iterdir())
    assert set(re.findall(r"\]\((attention_\w+\.svg)\)", TEXT)) == set(names)
    for name in names:
        (text, drawn), (wanted, images) = split(tmp_path / name), split(DOCS / name)
        assert text == wanted, name
        for ours, theirs in zip(drawn, images, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2 / 255)
