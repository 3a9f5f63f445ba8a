"""Scores a trained run: by its translations or its labels, with what its training took."""

import dataclasses
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.config import DecodeConfig
from transformer_jax.decoding.evaluation import line_scores, score
from transformer_jax.decoding.translator import Translator
from transformer_jax.files import AnyPath
from transformer_jax.models.make import count_parameters
from transformer_jax.runs import card, checkpoint, run
from transformer_jax.runs.run import Run
from transformer_jax.text.corpus import Corpus
from transformer_jax.text.files import read_lines
from transformer_jax.training.reporters import read_metrics

SEARCHES = [DecodeConfig(beam=5, penalty="power", alpha=a) for a in (0.6, 0.8, 1.0, 1.2, 1.4)]
SAMPLES = 3
"""Number of the worst and of the best translations that are shown."""

KEPT = {"placeholders": r"<\?>", "numbers": r"\d+(?:[.,]\d+)*", "function keys": r"\bF\d+\b"}
"""Patterns of what a translation has to keep, by name."""

Scored = tuple[dict[str, Any], dict[str, list[str]]]
"""The row of a run, and its translations of each set."""


class Data(NamedTuple):
    """The corpora of a study: the parts of a data set that it trains and chooses on, and tests."""

    folder: str
    pattern: str
    """The name of a corpus, in which {folder}, {part} and {language} are replaced."""
    train: str = "train"
    dev: str = "val"
    test: str = "test_2016_flickr"
    language: str = "de"
    blind: tuple[str, ...] = ()
    """Sets without references, {folder}/blind/SET.en.gz, which are translated, too."""

    def name(self, part: str) -> str:
        """Returns the name of the corpus of a part."""
        return self.pattern.format(folder=self.folder, part=part, language=self.language)

    def corpus(self, part: str) -> Corpus:
        """Returns the corpus of a part."""
        return Corpus(self.name(part))

    def sides(self, part: str) -> tuple[list[str], list[str]]:
        """Returns the sources and the targets of a part."""
        sources, targets = zip(*self.corpus(part).pairs(), strict=True)
        return list(sources), list(targets)

    def blind_sources(self) -> dict[str, list[str]]:
        """Returns the sources of each set without references."""
        return {part: [*read_lines(f"{self.folder}/blind/{part}.en.gz")] for part in self.blind}


def translations(
    trained: Run, data: Data, searches: Sequence[DecodeConfig] = SEARCHES, average: bool = False
) -> Scored:
    """Returns the scores of a run, as `translate` does, and what its training took.

    average: the mean of the newest checkpoints translates in place of the best one.
    """
    translating = averaged(trained) if average else trained
    values, outputs = translate([translating.folder], data, searches)
    return values | training(trained), outputs


def translate(
    runs: Sequence[AnyPath], data: Data, searches: Sequence[DecodeConfig] = SEARCHES
) -> Scored:
    """Returns the scores of a run, or of an ensemble, on the test set, which is translated once, as
    are the blind sets. The search is chosen on the development set."""
    folders = [f"{path}" for path in runs]
    translators = [Translator.load(*folders, decode=search) for search in searches]
    sources, references = data.sides(data.dev)
    bleu = [score(texts(translator, sources), references)["bleu"] for translator in translators]
    best = max(range(len(searches)), key=bleu.__getitem__)
    sources, references = data.sides(data.test)
    outputs = texts(translators[best], sources)
    scores = score(outputs, references, data.language)
    same = ("bleu_lower_tokenized", "chrf", "length_ratio", "signatures")
    values = {name: scores[name] for name in same} | {
        "bleu_cased_13a": scores["bleu"],
        "test_digest": data.corpus(data.test).digest,
        "samples": samples(sources, outputs, references),
        "kept": kept(sources, references, outputs),
        "val_bleu": bleu[best],
        "val_bleu_by_alpha": {f"{s.alpha:g}": b for s, b in zip(searches, bleu, strict=True)},
        "search": dataclasses.asdict(searches[best]),
    }
    blind = {part: texts(translators[best], each) for part, each in data.blind_sources().items()}
    return values, {data.test: outputs, **blind}


def texts(translator: Translator, sources: list[str]) -> list[str]:
    """Returns the translations."""
    return [translation.text for translation in translator(sources)]


def averaged(trained: Run) -> Run:
    """Returns the run of the mean of the newest checkpoints, which is made once."""
    folder = trained.folder.with_name(f"{trained.folder.name}_averaged")
    if run.exists(folder):
        return run.load(folder)
    return run.average(trained, trained.newest_steps(), folder)


def training(trained: Run) -> dict[str, Any]:
    """Returns what training took, its curve, and the card of the run."""
    records = read_metrics(trained.folder / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "train"]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    last = checkpoint.steps(trained.checkpoints)[-1]
    return {
        "parameters": count_parameters(trained.config.model, *trained.tokenizers.sizes),
        "minutes": checkpoint.progress(trained.checkpoints, last)["seconds"] / 60,
        "target_tokens": steps[-1]["target_tokens"],
        "steps": last,
        "best_step": trained.best_step(),
        "seed": trained.config.train.seed,
        "target_tokens_per_s": statistics.median(r["tokens_per_s"] for r in steps),
        "evaluations": [{"step": r["step"], **next(iter(r["sets"].values()))} for r in evaluations],
        "card": card.make(trained),
    }


def samples(
    sources: list[str], outputs: list[str], references: list[str]
) -> dict[str, list[dict[str, Any]]]:
    """Returns the translations of the lowest and of the highest chrF2, and their lines."""
    chrf = line_scores(outputs, references)
    order = sorted(range(len(chrf)), key=chrf.__getitem__)
    chosen = {"worst": order[:SAMPLES], "best": order[-SAMPLES:]}
    return {
        name: [
            {"line": i + 1, "source": sources[i], "output": outputs[i], "reference": references[i]}
            for i in lines
        ]
        for name, lines in chosen.items()
    }


def kept(
    sources: Sequence[str], references: Sequence[str], outputs: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Returns how many outputs keep what their sources hold of each pattern, as often as there.

    Only lines count whose references keep it, too: decimal points become commas, for instance.
    """
    counts = {}
    for name, pattern in KEPT.items():
        lines = []
        for texts in zip(sources, references, outputs, strict=True):
            wanted, reference, ours = (Counter(re.findall(pattern, text)) for text in texts)
            if wanted and wanted == reference:
                lines.append(wanted == ours)
        share = sum(lines) / len(lines) if lines else None
        counts[name] = {"lines": len(lines), "kept": sum(lines), "share": share}
    return counts


def labels(trained: Run, data: Data) -> Scored:
    """Returns the shares of recipes with both labels right, and with each."""
    sources, references = data.sides(data.test)
    outputs = texts(Translator.load(trained.folder), sources)
    wanted = np.array([reference.split() for reference in references])
    right = np.array([f"{output} - -".split()[:2] for output in outputs]) == wanted
    each = dict(zip(("trigger", "action"), right.mean(axis=0).tolist(), strict=True))
    shares = {"both": float(right.all(axis=1).mean()), **each}
    return shares | training(trained), {data.test: outputs}
