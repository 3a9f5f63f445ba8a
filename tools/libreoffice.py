"""Scores a run that was trained on LibreOffice's help, and writes results/libreoffice_en_de.json.

BLEU and chrF2 are those of `dev`, the only other part there is: it also chose the length penalty
and the best checkpoint. See `make libreoffice`.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.measured import measure
from transformer_jax.allocator import restart_with_allocator
from transformer_jax.benchmark import results
from transformer_jax.files import write_whole
from transformer_jax.parallel.program_cache import cache_programs
from transformer_jax.runs import run
from transformer_jax.text.corpus import Corpus, Pair

NAME = "libreoffice_en_de"
KEPT = {"placeholders": r"<\?>", "numbers": r"\d+(?:[.,]\d+)*", "function keys": r"\bF\d+\b"}
"""Patterns of what a translation has to keep, by name."""


def kept(pairs: Sequence[Pair], outputs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns how many outputs keep what their sources hold of each pattern, as often as there.

    Only lines count whose references keep it, too: decimal points become commas, for instance.
    """
    found = {}
    for name, pattern in KEPT.items():
        lines = []
        for (source, target), output in zip(pairs, outputs, strict=True):
            wanted, reference, ours = (
                Counter(re.findall(pattern, text)) for text in (source, target, output)
            )
            if wanted and wanted == reference:
                lines.append(wanted == ours)
        share = sum(lines) / len(lines) if lines else None
        found[name] = {"lines": len(lines), "kept": sum(lines), "share": share}
    return found


def main() -> None:
    """Reads --run and --data, and writes the result files."""
    restart_with_allocator()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    cache_programs()
    dev = Corpus(str(options.data / "dev.en-de.tsv.gz"))
    values, outputs = measure(run.load(options.run), dev, dev, "de")
    with write_whole(results.FOLDER / f"{NAME}.dev.txt") as file:
        file.writelines(f"{line}\n" for line in outputs)
    values |= {"kept": kept(list(dev.pairs()), outputs)}
    print(results.write(NAME, "make libreoffice", values))


if __name__ == "__main__":
    main()
