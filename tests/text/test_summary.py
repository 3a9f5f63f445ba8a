"""What is said of training text: how well tokenizers fit it, and which pairs recur."""

from pathlib import Path

import pytest
from common import Patch
from corpus_files import write

from transformer_jax.config import DataConfig, TokenizerConfig
from transformer_jax.text import summary, tokenizer
from transformer_jax.text.corpus import Corpora
from transformer_jax.text.summary import summarize

Pairs = list[tuple[str, str]]
PAIRS = [(f"the old book {i}", f"das alte Buch {i}") for i in range(60)]
TOKENIZERS = tokenizer.train(PAIRS, TokenizerConfig(vocabulary=320))
WORDS = tokenizer.train(PAIRS, TokenizerConfig(vocabulary=300, kind="word"))


def corpora(folder: Path, *train: Pairs, dev: Pairs) -> Corpora:
    """Corpora of these pairs."""
    named = {f"train{i}": pairs for i, pairs in enumerate(train)} | {"dev": dev}
    paths = [
        write(folder / f"{name}.tsv", "".join(f"{a}\t{b}\n" for a, b in pairs))
        for name, pairs in named.items()
    ]
    return Corpora.of(DataConfig(train=tuple(paths[:-1]), dev=(paths[-1],)))


@pytest.mark.parametrize(
    ("train", "dev", "equal", "common"),
    [
        (PAIRS, [("new", "neu")], 0, (0, 0)),
        (PAIRS + PAIRS[:7], PAIRS[:2], 7, (2, 2)),
        (PAIRS * 2, [PAIRS[0], PAIRS[0], (PAIRS[1][0], "neu"), ("x", PAIRS[2][1])], 60, (2, 3)),
        ([*PAIRS, (PAIRS[0][0], "neu")], [(PAIRS[3][0], PAIRS[4][1])], 0, (0, 1)),
    ],
)
def test_pairs_that_recur_are_counted(
    tmp_path: Path, train: Pairs, dev: Pairs, equal: int, common: tuple[int, int]
) -> None:
    both = corpora(tmp_path, train[:20], train[20:], dev=dev)  # of two corpora
    *_, repeated, overlap = summarize(both, TOKENIZERS, None)
    read = f"{len(train)} pairs read, of which {equal} equal an earlier one"
    assert repeated == f"training text: {read}"
    said = f"{common[0]} pairs and {common[1]} sources are in the training text, too"
    assert overlap == f"{both.dev[0].name}: {said}"


def test_a_quick_summary_reads_the_beginning_of_each_corpus(tmp_path: Path) -> None:
    later = corpora(tmp_path, PAIRS[:30], PAIRS[30:], dev=[PAIRS[4], PAIRS[5], PAIRS[34]])
    *_, repeated, overlap = summarize(later, TOKENIZERS, 10)
    assert repeated.startswith("training text: 10 pairs read")
    assert "2 pairs and 2 sources" in overlap


def test_equal_pairs_are_looked_for_in_bounded_memory(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(summary, "REMEMBERED", 30)
    pairs = [*PAIRS[:10], *PAIRS[:10], *PAIRS[20:40], *PAIRS[20:40]]
    repeated = summarize(corpora(tmp_path, pairs, dev=PAIRS[:1]), TOKENIZERS, None)[2]
    assert repeated == "training text: 60 pairs read, of which 10 equal an earlier one"


@pytest.mark.parametrize(
    ("text", "tokenizers", "tokens", "unknown"),
    [
        ("the old book", TOKENIZERS, "1.00", "0.00%"),
        ("the old ü", TOKENIZERS, "1.67", "40.00%"),  # ▁ and two bytes
        ("漢字", TOKENIZERS, "7.00", "85.71%"),
        ("the old 漢字", WORDS, "1.00", "33.33%"),
        ("", TOKENIZERS, "0.00", "0.00%"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_seen(
    tmp_path: Path, text: str, tokenizers: tokenizer.Tokenizers, tokens: str, unknown: str
) -> None:
    every = corpora(tmp_path, [(text, "the old book")] * 9, dev=PAIRS[:1])
    source, target, *_ = summarize(every, tokenizers)
    assert source == f"source text: {tokens} tokens a word, {unknown} of them bytes or unknown"
    assert target == "target text: 1.00 tokens a word, 0.00% of them bytes or unknown"
