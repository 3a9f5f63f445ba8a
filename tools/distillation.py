"""Sequence-level distillation: a student learns the translations of an ensemble.

The ensemble translates the sources that its members were trained on. The student learns its best
translations, or those of its hypotheses that are nearest to the references (Kim and Rush 2016,
sections 3.2 and 3.3).
"""

from collections.abc import Sequence
from pathlib import Path

import sacrebleu

from tools.scores import Data
from transformer_jax.config import DecodeConfig
from transformer_jax.decoding.translator import Translator
from transformer_jax.files import write_whole

SEARCH = DecodeConfig(beam=8, n_best=8, penalty="power", alpha=1.0)


def write_translations(teachers: Sequence[Path], data: Data, folder: Path) -> None:
    """Writes best.tsv and nearest.tsv, pairs of each source of the training data, unless they are
    there."""
    files = [folder / f"{name}.tsv" for name in ("best", "nearest")]
    if all(file.exists() for file in files):
        return
    folder.mkdir(parents=True, exist_ok=True)
    sources, references = data.sides(data.train)
    translator = Translator.load(*map(str, teachers), decode=SEARCH)
    bleu = sacrebleu.BLEU(effective_order=True)
    pairs: dict[Path, list[tuple[str, str]]] = {file: [] for file in files}
    for translation, reference in zip(translator.stream(sources), references, strict=True):
        texts = [hypothesis.text for hypothesis in translation.hypotheses]
        nearest = max(texts, key=lambda text: bleu.sentence_score(text, [reference]).score)
        for file, text in zip(files, (texts[0], nearest), strict=True):
            pairs[file].append((translation.source, text))
    for file, rows in pairs.items():
        with write_whole(file) as out:
            out.writelines("\t".join(row) + "\n" for row in rows)
