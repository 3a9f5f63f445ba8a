"""Scores translations: BLEU, chrF, the lower-cased BLEU of published results, and comparisons."""

import logging
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import sacrebleu
from sacrebleu.significance import PairedTest
from sacremoses import MosesPunctNormalizer, MosesTokenizer
from sacremoses.corpus import NonbreakingPrefixes

from transformer_jax.errors import UserError

logger = logging.getLogger(__name__)

_UNSPACED = re.compile(
    r"[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]"
)
"""Characters of scripts without spaces: from Thai to Myanmar, Khmer, Japanese and Chinese."""


Texts = Sequence[str]
References = Texts | Sequence[Texts]
"""A reference for each hypothesis, or several such lists."""


def score(
    hypotheses: Texts, references: References, language: str | None = None, tokenize: str = "13a"
) -> dict[str, Any]:
    """Returns the scores of translations by name, and the signatures of their metrics.

    `bleu` and `chrf` are cased sacreBLEU and chrF2 of raw text; `exact` is the fraction of lines
    that equal a reference, and `length_ratio` the number of BLEU's tokens over that of the
    references. With the target's `language` there is also `bleu_lower_tokenized`, the metric of
    published Multi30k scores: BLEU after lower-casing, Moses normalization and tokenization of both
    sides. Both sides are first composed to Unicode's NFC, so that the encoding of an accent makes
    no difference.

    tokenize: the tokenizer of `bleu`. UserError: Moses does not know the language, or a package is
    missing.
    """
    hypotheses, references = _compose(hypotheses), _compose_all(references)
    bleu, chrf = bleu_metric(tokenize), sacrebleu.CHRF()
    result = bleu.corpus_score(hypotheses, references)
    scores: dict[str, Any] = {
        "bleu": result.score,
        "chrf": chrf.corpus_score(hypotheses, references).score,
        "exact": float(np.mean([a in b for a, *b in zip(hypotheses, *references, strict=True)])),
        "length_ratio": result.sys_len / max(result.ref_len, 1),
        "signatures": {"bleu": str(bleu.get_signature()), "chrf": str(chrf.get_signature())},
    }
    if language is not None:
        tokenized = sacrebleu.BLEU(tokenize="none", force=True)
        lines, *answers = (lower_tokenize(text, language) for text in (hypotheses, *references))
        scores["bleu_lower_tokenized"] = tokenized.corpus_score(lines, answers).score
        signature = f"{tokenized.get_signature()}|prepared:lower+sacremoses-{language}"
        scores["signatures"]["bleu_lower_tokenized"] = signature
    return scores


def compare(
    baseline: Texts, hypotheses: Texts, references: References, tokenize: str = "13a"
) -> dict[str, dict[str, Any]]:
    """Returns sacreBLEU's paired bootstrap of translations against those of a baseline.

    For each of `bleu` and `chrf`: the scores of both, each with the mean and the 95 % interval of
    1,000 resamples, the p-value of the difference, and the signature. (Koehn 2004)
    """
    systems: Any = [("baseline", _compose(baseline)), ("ours", _compose(hypotheses))]
    metrics: dict[str, Any] = {"BLEU": bleu_metric(tokenize), "chrF2": sacrebleu.CHRF()}
    test = PairedTest(systems, metrics, _compose_all(references), test_type="bs", n_samples=1000)
    signatures, rows = test()
    results: dict[str, Any] = rows
    comparisons: dict[str, dict[str, Any]] = {}
    for name, key in (("bleu", "BLEU"), ("chrf", "chrF2")):
        parts = ("score", "mean", "ci")
        theirs, ours = ({part: float(getattr(x, part)) for part in parts} for x in results[key])
        comparisons[name] = {
            "baseline": theirs,
            "ours": ours,
            # No resample of equal outputs differs more than they do; sacreBLEU says 1 / 1001.
            "p_value": 1.0 if theirs == ours else float(results[key][1].p_value),
            "signature": str(signatures[key]),
        }
    return comparisons


def line_scores(hypotheses: Sequence[str], references: References) -> list[float]:
    """Returns the chrF2 of each line."""
    chrf = sacrebleu.CHRF()
    rows = zip(_compose(hypotheses), *_compose_all(references), strict=True)
    return [chrf.sentence_score(ours, wanted).score for ours, *wanted in rows]


def bleu_metric(tokenize: str) -> sacrebleu.BLEU:
    """Returns BLEU with one of sacreBLEU's tokenizers. UserError: a package that it needs is
    missing."""
    try:
        return sacrebleu.BLEU(tokenize=tokenize)
    except RuntimeError as error:
        extra = f"sacrebleu[{tokenize.partition('-')[0]}]"
        raise UserError(f"tokenize={tokenize}: needs packages: pip install '{extra}'") from error


def warn_of_unspaced(name: str, references: Sequence[str], tokenize: str) -> None:
    """Warns if most of a corpus' first references are blank, or are text without spaces, and the
    tokenizer takes such a text for one word."""
    first = references[:1000]
    lines = [line for line in first if line.strip()]
    if 2 * len(lines) < len(first):
        logger.warning("%s: most targets are blank, and no score of translations is right", name)
    unspaced = (" " not in line or 2 * len(_UNSPACED.findall(line)) > len(line) for line in lines)
    if tokenize in ("13a", "intl") and 2 * sum(unspaced) > len(lines):
        logger.warning(
            "%s: most targets have no spaces between words, for which BLEU with tokenize=%s has no "
            "meaning; choose zh (Chinese) or char: train.tokenize, or --tokenize of evaluate",
            *(name, tokenize),
        )


def require_language(language: str) -> None:
    """Checks that Moses has a list of abbreviations for a language, and finds its words.

    Moses itself would use the English list without a warning. UserError: it does not.
    """
    if language in ("zh", "yue"):
        way = "leave it out, and choose --tokenize=zh or --tokenize=char"
        raise UserError(f"--language={language}: Moses finds no words without spaces; {way}")
    languages = sorted({*NonbreakingPrefixes().available_langs.values()} - {"yue", "zh"})
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


def _compose_all(references: References) -> list[list[str]]:
    alone = [each for each in references if isinstance(each, str)]
    return [_compose(alone)] if alone else [_compose(each) for each in references]


def _compose(lines: Iterable[str]) -> list[str]:
    return [unicodedata.normalize("NFC", line) for line in lines]
