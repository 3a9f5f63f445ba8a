"""Brings the generated parts of README.md and docs/*.md up to date with the code and results/.

A part stands between `<!-- NAME -->` and `<!-- end -->`; NAME is a key of `parts`, and any document
may have it.
"""

import ast
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from tools import tables
from tools.measure import CASES
from tools.studies import STUDIES
from transformer_jax import config as config_module
from transformer_jax.benchmark import results
from transformer_jax.config import Config

ROOT = Path(__file__).parents[1]
CARD = ROOT / "models/libreoffice_en_de/README.md"
DOCUMENTS = (ROOT / "README.md", CARD, *sorted((ROOT / "docs").glob("*.md")))

PACKAGE = Path("transformer_jax")


def parts() -> dict[str, str]:
    """Returns the text of every part, by name."""
    of_code = {"results": result_table(), "config": config_table(), "tree": tree()}
    return tables.parts() | of_code


def result_table() -> str:
    """Returns what each result file holds, and with what it was measured."""
    head = ("result", "what", "command", "commit, date", "machine", "Python, JAX, Flax", "run card")
    rows = []
    for path in sorted(results.FOLDER.glob("*.json")):
        contents = results.read(path.stem)
        stored = contents.get("rows", {})
        in_rows = isinstance(stored, dict) and any("card" in row for row in stored.values())
        versions = contents.get("card", {}).get("provenance", contents)["versions"]
        changes = " with changes" * contents["dirty"]
        what = f"[{path.stem}](../{path})", about(path.stem), f"`{contents['command']}`"
        origin = f"`{contents['commit'][:10]}`{changes}, {contents['date']}"
        software = ", ".join(versions[name] for name in ("python", "jax", "flax"))
        card = "yes" if "card" in contents else "each row" * in_rows
        rows.append((*what, origin, tables.processor(contents), software, card))
    return tables.table(head, *rows)


def about(name: str) -> str:
    """Returns what the result file of a study, of a measured case or of a module holds."""
    if name in STUDIES:
        return STUDIES[name].about
    if name in CASES:
        return (CASES[name].__doc__ or "").partition(".")[0]
    modules = (folder / f"{name}.py" for folder in (Path("tools"), PACKAGE / "benchmark"))
    return first_line(next(filter(Path.exists, modules))).partition(".")[0]


def config_table() -> str:
    """Returns every field of the config with its default and its meaning.

    Fields of the three attentions that have the same default share a row.
    """
    fields = _field_rows(Config(), field_texts())
    rows = [(re.sub(r"\w+_attention\.", "*_attention.", name), *rest) for name, *rest in fields]
    return tables.table(("field", "default", "meaning"), *dict.fromkeys(rows))


def _field_rows(
    section: Any, texts: Mapping[tuple[str, str], str], name: str = ""
) -> Iterator[tuple[str, ...]]:
    hints = get_type_hints(type(section))
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _field_rows(value, texts, f"{name}{field.name}.")
        else:
            text = " ".join(texts[type(section).__name__, field.name].split())
            choices = get_args(hints[field.name])
            others = [f"`{x!r}`" for x in choices if isinstance(x, str) and x != value]
            default = f"`{value!r}`" + (f" (or {', '.join(others)})" if others else "")
            yield f"`{name}{field.name}`", default, text


def tree() -> str:
    """Returns the configs, the packages and the modules beside them, each with what it is for."""
    configs = [path for path in sorted(Path("configs").glob("*.py")) if "14_" not in path.stem]
    packages = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
    modules = [path for path in sorted(PACKAGE.glob("*.py")) if path.name != "__init__.py"]
    lines = {f"{path}": first_line(path) for path in (Path("train.py"), *configs)}
    lines["configs/{iwslt14,wmt14}_*.py"] = "IWSLT14 and WMT14 with the published settings."
    lines[f"{PACKAGE}/"] = first_line(PACKAGE / "__init__.py")
    lines |= {f"  {path.name}/": first_line(path / "__init__.py") for path in packages}
    lines |= {f"  {path.name}": first_line(path) for path in modules}
    width = max(map(len, lines))
    return "```\n" + "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items()) + "\n```"


def first_line(path: Path) -> str:
    """Returns the first line of a module's docstring, or ""."""
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]


def field_texts() -> dict[tuple[str, str], str]:
    """Returns the docstring of each field, by dataclass and name, from the source of config.py."""
    source = Path(str(config_module.__file__)).read_text("utf-8")
    texts: dict[tuple[str, str], str] = {}
    for part in ast.parse(source).body:
        if isinstance(part, ast.ClassDef):
            for field, text in itertools.pairwise(part.body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    texts[part.name, ast.unparse(field.target)] = ast.literal_eval(text.value)
    return texts


def update(text: str, made: Mapping[str, str]) -> str:
    """Returns a document's text with every generated part replaced."""

    def part(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{made[match[1]]}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", part, text, flags=re.S)


def main() -> None:
    """Rewrites the documents."""
    made = parts()
    for document in DOCUMENTS:
        document.write_text(update(document.read_text("utf-8"), made), "utf-8")


if __name__ == "__main__":
    main()
