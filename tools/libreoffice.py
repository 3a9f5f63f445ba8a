"""Scores the run that was trained on LibreOffice's help; see `make libreoffice`.

Writes results/libreoffice_en_de.json: BLEU and chrF on the development set, the share of
placeholders that translations keep, and the worst and the best of them.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.measured import samples, training
from transformer_jax.allocator import restart_with_allocator
from transformer_jax.benchmark import results
from transformer_jax.decoding.evaluation import score
from transformer_jax.decoding.translator import Translator
from transformer_jax.parallel.program_cache import cache_programs
from transformer_jax.runs import run
from transformer_jax.text.corpus import Corpus

PLACEHOLDER = re.compile(
    r"<[^<>\s]+>"  # <?>, <A1>
    r"|\{[^{}\s]+\}"  # {Installation}
    r"|\$\w+|%\w+"  # $time, %PRODUCTNAME
    r"|\[:\w+:\]"  # [:digit:]
    r"|\b[A-Z]{1,2}\d+(?::[A-Z]{1,2}\d+)?\b"  # cells: A1, B2:B7
)


def kept_placeholders(
    sources: Sequence[str], outputs: Sequence[str], references: Sequence[str]
) -> dict[str, Any]:
    """Returns the number of placeholders that source and reference share, and the share of them
    that the output has, too."""
    wanted = kept = 0
    for texts in zip(sources, outputs, references, strict=True):
        source, output, reference = (Counter(PLACEHOLDER.findall(text)) for text in texts)
        shared = source & reference
        wanted += shared.total()
        kept += (shared & output).total()
    return {"placeholders": wanted, "placeholders_kept": kept / max(wanted, 1)}


def main() -> None:
    """Reads --run and --data, and writes the result file."""
    restart_with_allocator()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    cache_programs()
    trained = run.load(options.run)
    dev = Corpus(f"{options.data}/dev.en-de.tsv.gz")
    sources, references = map(list, zip(*dev.pairs(), strict=True))
    outputs = [translation.text for translation in Translator.load(options.run)(sources)]
    scores = score(outputs, references)
    found = {
        "bleu_cased_13a": scores["bleu"],
        "chrf": scores["chrf"],
        "length_ratio": scores["length_ratio"],
        "signatures": scores["signatures"],
        **kept_placeholders(sources, outputs, references),
        "samples": samples(sources, outputs, references),
    }
    print(results.write("libreoffice_en_de", "make libreoffice", found | training(trained)))


if __name__ == "__main__":
    main()
