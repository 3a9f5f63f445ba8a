"""Scores translations: BLEU, chrF, the lower-cased BLEU of published results, and comparisons."""

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import sacrebleu
from sacrebleu.significance import PairedTest
from sacremoses import MosesPunctNormalizer, MosesTokenizer
from sacremoses.corpus import NonbreakingPrefixes

from transformer_jax.errors import UserError


def score(
    hypotheses: Sequence[str], references: Sequence[str], language: str | None = None
) -> dict[str, Any]:
    """Returns the scores of translations by name, and the signatures of their metrics.

    `bleu` and `chrf` are cased sacreBLEU (13a) and chrF2 of raw text; `exact` is the fraction of
    lines that equal their reference, and `length_ratio` the number of 13a tokens over that of the
    references. With the target's `language` there is also `bleu_lower_tokenized`, the metric of
    published Multi30k scores: BLEU after lower-casing, Moses normalization and tokenization of both
    sides. Both sides are first composed to Unicode's NFC, so that the encoding of an accent makes
    no difference.

    UserError: Moses does not know the language.
    """
    hypotheses, references = _compose(hypotheses), _compose(references)
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    result = bleu.corpus_score(hypotheses, [references])
    scores: dict[str, Any] = {
        "bleu": result.score,
        "chrf": chrf.corpus_score(hypotheses, [references]).score,
        "exact": float(np.mean([a == b for a, b in zip(hypotheses, references, strict=True)])),
        "length_ratio": result.sys_len / max(result.ref_len, 1),
        "signatures": {"bleu": str(bleu.get_signature()), "chrf": str(chrf.get_signature())},
    }
    if language is not None:
        tokenized = sacrebleu.BLEU(tokenize="none", force=True)
        lines, answers = (lower_tokenize(text, language) for text in (hypotheses, references))
        scores["bleu_lower_tokenized"] = tokenized.corpus_score(lines, [answers]).score
        signature = f"{tokenized.get_signature()}|prepared:lower+sacremoses-{language}"
        scores["signatures"]["bleu_lower_tokenized"] = signature
    return scores


def compare(
    baseline: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Returns sacreBLEU's paired bootstrap of translations against those of a baseline.

    For each of `bleu` and `chrf`: the scores of both, each with the mean and the 95 % interval of
    1,000 resamples, the p-value of the difference, and the signature. (Koehn 2004)
    """
    systems: list[tuple[str, Sequence[str]]] = [
        ("baseline", _compose(baseline)),
        ("ours", _compose(hypotheses)),
    ]
    metrics: dict[str, Any] = {"BLEU": sacrebleu.BLEU(), "chrF2": sacrebleu.CHRF()}
    test = PairedTest(systems, metrics, [_compose(references)], test_type="bs", n_samples=1000)
    signatures, rows = test()
    results: dict[str, Any] = rows
    comparisons: dict[str, dict[str, Any]] = {}
    for name, key in (("bleu", "BLEU"), ("chrf", "chrF2")):
        theirs, ours = (
            {part: float(getattr(result, part)) for part in ("score", "mean", "ci")}
            for result in results[key]
        )
        comparisons[name] = {
            "baseline": theirs,
            "ours": ours,
            # No resample of equal outputs differs more than they do; sacreBLEU says 1 / 1001.
            "p_value": 1.0 if theirs == ours else float(results[key][1].p_value),
            "signature": str(signatures[key]),
        }
    return comparisons


def line_scores(hypotheses: Sequence[str], references: Sequence[str]) -> list[float]:
    """Returns the chrF2 of each line."""
    chrf = sacrebleu.CHRF()
    pairs = zip(_compose(hypotheses), _compose(references), strict=True)
    return [chrf.sentence_score(ours, [wanted]).score for ours, wanted in pairs]


def require_language(language: str) -> None:
    """Checks that Moses has a list of abbreviations for a language. UserError: it has none.

    Moses itself would use the English list without a warning.
    """
    languages = sorted({*NonbreakingPrefixes().available_langs.values()})
    if language not in languages:
        raise UserError(f"--language={language}: must be one of {', '.join(languages)}")


def lower_tokenize(lines: Iterable[str], language: str) -> list[str]:
    """Returns the lines lower-cased, with Moses' normalization of punctuation and tokenization.

    UserError: Moses does not know the language.
    """
    require_language(language)
    normalize = MosesPunctNormalizer(language).normalize
    tokenize = MosesTokenizer(language).tokenize
    return [str(tokenize(normalize(line.lower()), return_str=True, escape=True)) for line in lines]


def _compose(lines: Iterable[str]) -> list[str]:
    return [unicodedata.normalize("NFC", line) for line in lines]
