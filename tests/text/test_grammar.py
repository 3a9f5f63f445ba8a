"""The built-in corpus: the same everywhere, one translation for each sentence, what splits hold."""

import subprocess
import sys
from itertools import chain, islice

import pytest

from transformer_jax.text.corpora import grammar, lexicon

SPLITS = ("train", "validation", "test_seen", "test_new")
DIGEST = "ba2cbed0b92cfaf6a9e658e5874015238519fd5e32b06a0f24f5c6a5a46e84b7"
"""SHA-256 of all pairs: results that were measured on the corpus hold for this one only."""


def test_splits_have_the_promised_sizes_and_no_sentence_twice() -> None:
    assert [len(grammar.load(split)) for split in SPLITS] == [20_000, 500, 400, 100]
    assert grammar.load("test") == grammar.load("test_seen") + grammar.load("test_new")
    sources = [pair.source for pair in chain.from_iterable(map(grammar.load, SPLITS))]
    assert len({*sources}) == len(sources)


def test_unknown_split_is_one_line_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"^split 'dev': must be one of train, .*test_new.*$"):
        grammar.load("dev")


def test_caller_may_change_what_load_returns() -> None:
    grammar.sentences("test").clear()
    assert len(grammar.load("test")) == 500


def test_corpus_is_the_same_in_every_process() -> None:
    program = (
        "import hashlib; from transformer_jax.text.corpora import grammar\n"
        f"pairs = [grammar.load(split) for split in {SPLITS}]\n"
        "text = ''.join(f'{s}\\t{t}\\n' for split in pairs for s, t in split)\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert result.stdout.decode().strip() == DIGEST


def test_every_english_sentence_has_one_german_one() -> None:
    pairs = {sentence.pair for sentence in islice(grammar.sample(seed=1), 40_000)}
    assert 39_000 < len(pairs) == len({source for source, _ in pairs})


def combinations(split: str) -> set[tuple[str, str]]:
    return {(lemma, s.frame) for s in grammar.sentences(split) for lemma in s.lemmas}


def test_new_combinations_are_unknown_to_training_and_their_parts_are_known() -> None:
    trained, validated = combinations("train"), combinations("validation")
    for sentence in grammar.sentences("test_new"):
        assert not {(lemma, sentence.frame) for lemma in sentence.lemmas} <= trained | validated
    assert validated | combinations("test_seen") <= trained
    new = combinations("test_new") - trained
    assert len(new) >= 20
    assert {lemma for lemma, _ in new} <= {lemma for lemma, _ in trained}
    assert {frame for _, frame in new} <= {frame for _, frame in trained} == {*lexicon.FRAMES}
