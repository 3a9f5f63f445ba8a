"""Brings the generated parts of README.md and docs/ up to date with the code and results/.

A part stands between `<!-- NAME -->` and `<!-- end -->`; NAME is a function of `PARTS`.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformer_jax import config as config_module
from transformer_jax.benchmark import results
from transformer_jax.config import Config

DOCUMENTS = (Path("README.md"), Path("docs/attention.md"))

OTHER_FILES = {
    "Makefile": "every command of the project",
    "docs/attention.md": "every kind of attention: formula, picture, when to use it, and your own",
    "pyproject.toml": "package, dependencies, settings of the tools",
    "constraints.txt": "exact versions of all dependencies",
    "notebooks/quickstart.ipynb": "the first run from Python, with a map of attention",
    "tests/": "a file for each room, and fixtures",
    "results/": "measured numbers and figures, each with the command that made it",
    ".ci/run": "what every change must pass",
}


def multi30k() -> str:
    """The result table."""
    found = results.read("multi30k_en_de")
    machine = found["machine"]
    rows = [
        ("BLEU, lower-cased and tokenised", f"{found['bleu_lower_tokenised']:.2f}"),
        ("BLEU, cased, sacreBLEU 13a", f"{found['bleu_cased_13a']:.2f}"),
        ("chrF2", f"{found['chrf']:.2f}"),
        ("parameters", f"{found['parameters']:,}"),
        ("training", f"{found['minutes']:.0f} minutes, {found['steps']:,} steps"),
        ("target tokens a second", f"{found['target_tokens_per_s']:,.0f}"),
        ("machine", f"{machine['cores']} CPU cores ({machine['processor']})"),
    ]
    return _table(("Multi30k English-German, test_2016_flickr", ""), rows)


def attention() -> str:
    """Kernel `auto` against PyTorch's attention."""
    found = results.read("attention")
    columns = list(itertools.product(("forward", "both"), ("1", "8")))
    rows = [
        (
            f"{int(length):,}{', causal' if 'causal' in key else ''}",
            *(f"{found[key][direction][batch][length]:.2f}" for direction, batch in columns),
        )
        for key in ("ratio_to_torch", "ratio_to_torch_causal")
        if found[key]
        for length in found[key]["forward"]["1"]
    ]
    names = {"forward": "forward", "both": "forward and backward"}
    head = ("length", *(f"{names[d]}, batch {b}" for d, b in columns))
    return _table(head, rows)


def layers() -> str:
    """Stacked against separate layers."""
    rows = [
        (
            f"{name}, {layers}",
            f"{found[layers]['step_ms']:,.0f}",
            f"{found[layers]['compile_s']:.1f}",
            f"{found[layers]['temporaries_mib']:,.0f}",
        )
        for name, found in results.read("layers")["presets"].items()
        for layers in ("separate", "stacked")
    ]
    return _table(("layers", "step, ms", "compile, s", "temporaries, MiB"), rows)


def windows() -> str:
    """What a query of local attention costs, beside global attention."""
    rows = results.read("windows")["rows"]
    lengths = sorted({row["length"] for row in rows})
    found: dict[tuple[str, int | None], dict[tuple[str, int], dict[str, Any]]] = {}
    for row in rows:
        kind = found.setdefault((row["kind"], row["window"]), {})
        kind[row["mode"], row["length"]] = row

    def cells(mode: str, value: str, unit: int, text: str) -> Callable[[Any], str]:
        return lambda kind: " / ".join(format(kind[mode, n][value] / unit, text) for n in lengths)

    columns = {
        "thousand operations": cells("forward", "flops_per_query", 1000, ",.0f"),
        "µs, forward": cells("forward", "us_per_query", 1, ".1f"),
        "µs, forward and backward": cells("both", "us_per_query", 1, ".1f"),
    }
    table = [
        (f"`{kind}`, D = {window}" if window else f"`{kind}`", *(c(x) for c in columns.values()))
        for (kind, window), x in sorted(found.items(), key=lambda f: (f[0][0], f[0][1] or 0))
    ]
    return _table((f"a query, of {' / '.join(map(str, lengths))}", *columns), table)


def recipes() -> str:
    """Latent attention and its baselines."""
    found = results.read("recipes")["models"]
    rows = [
        (
            name,
            f"{model['parameters']:,}",
            *(_spread(model[labels]) for labels in ("both", "trigger", "action")),
        )
        for name, model in found.items()
    ]
    return _table(("% right, least to most", "parameters", "both", "trigger", "action"), rows)


def _spread(shares: list[float]) -> str:
    """Percentages from the least to the most."""
    ends = [f"{100 * end:.1f}" for end in (min(shares), max(shares))]
    return " to ".join(dict.fromkeys(ends))


def attention_kinds() -> str:
    """The kinds of attention in the same model."""
    head = ("kind", "validation loss", "BLEU", "chrF2", "parameters", "tokens a second")
    rows = [
        (
            f"`{label}`",
            f"{found['validation_loss']:.3f}",
            f"{found['bleu_cased_13a']:.1f}",
            f"{found['chrf']:.1f}",
            f"{found['parameters']:,}",
            f"{found['train_tokens_per_s']:,.0f}",
        )
        for label, found in results.read("attention_kinds")["kinds"].items()
    ]
    return _table(head, rows)


def gradient_noise() -> str:
    """What sampled choices learn from."""
    found = results.read("attention_kinds")["estimators"]
    rows = [
        (
            name,
            f"{each['variance']:.1e}",
            f"{each['squared_mean']:.1e}"
            if each["squared_mean"] > each["variance"] / found["samples"]
            else "lost in the noise",
        )
        for name, each in found.items()
        if isinstance(each, dict)
    ]
    return _table(("gradient by", "variance", "squared mean"), rows)


def config_table() -> str:
    """Every field of the config, its default and what it means."""
    return _table(("field", "default", "meaning"), list(_field_rows(Config(), _field_texts())))


def _field_rows(
    section: Any, texts: dict[tuple[str, str], str], name: str = ""
) -> Iterator[tuple[str, ...]]:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _field_rows(value, texts, f"{name}{field.name}.")
        else:
            text = " ".join(texts[type(section).__name__, field.name].split())
            yield f"`{name}{field.name}`", f"`{value!r}`", text


def tree() -> str:
    """The files, each with the first line of its docstring."""
    paths = [Path("train.py"), *sorted(Path("configs").glob("*.py"))]
    paths += sorted(Path("transformer_jax").rglob("*.py"), key=lambda p: (len(p.parts), str(p)))
    lines = {
        str(path): _first_line(path) for path in paths if path.read_text().strip()
    } | OTHER_FILES
    width = max(map(len, lines))
    return "```\n" + "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items()) + "\n```"


PARTS: dict[str, Callable[[], str]] = {
    "multi30k": multi30k,
    "attention": attention,
    "layers": layers,
    "windows": windows,
    "recipes": recipes,
    "attention_kinds": attention_kinds,
    "gradient_noise": gradient_noise,
    "config": config_table,
    "tree": tree,
}


def update(text: str) -> str:
    """A document's text with every generated part made anew."""

    def part(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{PARTS[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", part, text, flags=re.S)


def main() -> None:
    """Rewrites the documents."""
    for document in DOCUMENTS:
        document.write_text(update(document.read_text("utf-8")), "utf-8")


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]


def _field_texts() -> dict[tuple[str, str], str]:
    """The string below each field of each dataclass in config.py."""
    source = Path(str(config_module.__file__)).read_text("utf-8")
    texts: dict[tuple[str, str], str] = {}
    for part in ast.parse(source).body:
        if isinstance(part, ast.ClassDef):
            for field, text in itertools.pairwise(part.body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    texts[part.name, ast.unparse(field.target)] = ast.literal_eval(text.value)
    return texts


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    main()
