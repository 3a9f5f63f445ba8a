"""docs/attention.md is true: its Python runs, its commands work, its pictures are drawn."""

import base64
import io
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot

from tools import pictures
from transformer_jax.attention import layer_kinds
from transformer_jax.cli import common
from transformer_jax.cli.main import main
from transformer_jax.config import Config, to_json

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "attention.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)
OWN = next(block for block in BLOCKS if block.startswith("# sparse.py\n"))


@pytest.mark.long
def test_the_python_of_the_guide_runs() -> None:
    space: dict[str, Any] = {}
    for block in BLOCKS:
        if block != OWN:
            exec(compile(block, "attention.md", "exec"), space)
    functions = set(re.findall(r"\b(\w+_attention)\(", "".join(BLOCKS)))
    assert functions == {name for name in dir(layer_kinds.kinds) if name.endswith("_attention")}


def arguments_of(block: str) -> list[list[str]]:
    """The arguments of each `transformer-jax` in a block of the guide."""
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(x.split("transformer-jax ")[1]) for x in lines if "transformer-jax " in x]


BUILT_IN = ("soft", "hard", "gumbel", "local-m", "local-p", "latent", "plain")


@pytest.mark.long
def test_a_kind_of_ones_own_as_the_guide_has_it(
    tiny_config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its commands, typed in a folder that has the file, with a config of fewer steps."""
    own = replace(tiny_config, model=replace(tiny_config.model, attention_dropout=0.0))
    text = f"from transformer_jax.config import *\nget_config = lambda: from_json({to_json(own)!r})"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/quickstart.py").write_text(text, "utf-8")
    (tmp_path / "sparse.py").write_text(OWN, "utf-8")
    (tmp_path / "text").write_text("red old\nnew\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(common, "cache_programs", lambda: None)
    built_in = {k: v for k, v in layer_kinds.KINDS.items() if k in BUILT_IN}
    monkeypatch.setattr(layer_kinds, "KINDS", built_in.copy())
    typed, refused = re.findall(r"```(?:sh|console)\n(.*?)```", TEXT, re.S)
    train, translate = arguments_of(typed)
    main(train)
    capsys.readouterr()
    main([*translate, "--input=text"])
    assert len(capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setattr(layer_kinds, "KINDS", built_in.copy())
    with pytest.raises(SystemExit):
        main(arguments_of(refused)[0])
    assert capsys.readouterr().err == refused.partition("\n")[2]


def test_the_kind_of_ones_own_is_twenty_lines() -> None:
    code = [line for line in OWN.splitlines() if line.strip() and not line.startswith("#")]
    assert len(code) <= 20


def split(svg: Path) -> tuple[str, list[np.ndarray]]:
    """A picture's lines and text, and the pixels of its images."""
    image = r'data:image/png;base64,\s*([^"]+)"'
    text = svg.read_text("utf-8")
    pixels = (base64.b64decode(found) for found in re.findall(image, text))
    return re.sub(image, "", text), [pyplot.imread(io.BytesIO(each)) for each in pixels]


@pytest.mark.long
def test_the_pictures_are_those_that_are_drawn(tmp_path: Path) -> None:
    """`make docs` draws them. Images may differ by rounding, all else by nothing."""
    pictures.draw(tmp_path)
    names = sorted(path.name for path in DOCS.glob("*.svg"))
    assert names == sorted(path.name for path in tmp_path.iterdir())
    assert set(re.findall(r"\]\((attention_\w+\.svg)\)", TEXT)) == set(names)
    for name in names:
        (found, drawn), (wanted, images) = split(tmp_path / name), split(DOCS / name)
        assert found == wanted, name
        for ours, theirs in zip(drawn, images, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2 / 255)
