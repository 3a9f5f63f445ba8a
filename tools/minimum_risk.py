"""Compares minimum Bayes risk decoding with beam search, on the development set of Multi30k.

    python -m tools.minimum_risk RUN [RUN ...]

Of the samples of a sentence, it takes the one with the highest mean chrF2 against all of them
(Eikema and Aziz 2020, section 5; Müller and Sennrich 2021). Writes results/minimum_risk.json.
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import sacrebleu

from tools.scores import texts
from tools.studies import MULTI30K
from transformer_jax.allocator import restart_with_allocator
from transformer_jax.benchmark import results
from transformer_jax.config import DecodeConfig
from transformer_jax.decoding.evaluation import score
from transformer_jax.decoding.translator import Translator
from transformer_jax.parallel.program_cache import cache_programs

SAMPLES = 64
TEMPERATURES = (1.0, 0.5)


def least_risk(samples: Iterable[str]) -> str:
    """Returns the sample with the highest mean chrF2 against all samples."""
    counts, chrf = Counter(samples), sacrebleu.CHRF()

    def utility(text: str) -> float:
        return sum(n * chrf.sentence_score(text, [other]).score for other, n in counts.items())

    return max(counts, key=utility)


def sampled(run: str, sources: Sequence[str], temperature: float) -> list[str]:
    """Returns the sample of least risk of each sentence."""
    search = DecodeConfig(sample=True, n_best=SAMPLES, temperature=temperature)
    found = Translator.load(run, decode=search)(list(sources))
    return [least_risk(each.text for each in translation.hypotheses) for translation in found]


def main() -> None:
    """Reads the runs, one for each seed, and --data, and writes the scores of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--data", default=MULTI30K.folder, metavar="FOLDER")
    options = parser.parse_args()
    cache_programs()
    data = MULTI30K._replace(folder=options.data)
    sources, references = data.sides(data.dev)
    rows: list[dict[str, Any]] = []
    for run in options.runs:
        outputs = {"beam": texts(Translator.load(run), sources)}
        outputs |= {f"samples_{t:g}": sampled(run, sources, t) for t in TEMPERATURES}
        found = {name: score(lines, references) for name, lines in outputs.items()}
        rows.append({n: {"bleu": each["bleu"], "chrf": each["chrf"]} for n, each in found.items()})
        print(rows[-1], flush=True)
    values = {"samples": SAMPLES, "lines": len(sources), "rows": rows}
    print(results.write("minimum_risk", 'make measure NAME=minimum_risk TRAINED="RUN RUN"', values))


if __name__ == "__main__":
    restart_with_allocator()
    main()
