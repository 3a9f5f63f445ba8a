"""The reference of the site has every module and every command."""

from pathlib import Path

from tools import reference
from transformer_jax.cli.commands import COMMANDS

PACKAGE = Path(__file__).parents[2] / "transformer_jax"


def test_every_module_has_a_place(tmp_path: Path) -> None:
    """All but those of the command line, which has its own page."""
    reference.write(tmp_path / "reference")
    texts = {path.stem: path.read_text("utf-8") for path in (tmp_path / "reference").iterdir()}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if name != "transformer_jax" and parts[1] != "cli":
            assert f".. automodule:: {name}\n" in texts[parts[1]]
    for command in COMMANDS:
        assert f"usage: transformer-jax {command} [-h]" in texts["commands"]
