"""Sequence-level distillation: a student learns the translations of an ensemble.

The ensemble translates the sources that its members were trained on. The student learns its best
translations, or those of its hypotheses that are nearest to the references (Kim and Rush 2016,
sections 3.2 and 3.3), beside the references. A reverse model translates the references, too, so
that each has a second source (Nguyen et al. 2020, Data Diversification, section 3).
"""

from collections.abc import Sequence
from pathlib import Path

import sacrebleu

from tools.scores import Data, texts
from tools.study import write_rows
from transformer_jax.config import DecodeConfig
from transformer_jax.decoding.translator import Translator

SEARCH = DecodeConfig(beam=8, n_best=8, penalty="power", alpha=1.0)


def write_corpora(teachers: Sequence[Path], reverse: Path, data: Data, folder: Path) -> None:
    """Writes best.tsv and nearest.tsv, a translation of each source of the training data, and
    back.tsv, a source of each reference, unless they are there."""
    files = [folder / f"{name}.tsv" for name in ("best", "nearest", "back")]
    if all(file.exists() for file in files):
        return
    sources, references = data.sides(data.train)
    bleu = sacrebleu.BLEU(effective_order=True)
    best, nearest = [], []
    ensemble = Translator.load(*map(str, teachers), decode=SEARCH)
    for translation, reference in zip(ensemble.stream(sources), references, strict=True):
        hypotheses = [hypothesis.text for hypothesis in translation.hypotheses]
        best.append(hypotheses[0])
        nearest.append(max(hypotheses, key=lambda x: bleu.sentence_score(x, [reference]).score))
    back = texts(Translator.load(f"{reverse}"), references)
    sides = (sources, best), (sources, nearest), (back, references)
    for file, pair in zip(files, sides, strict=True):
        write_rows(file, zip(*pair, strict=True))
