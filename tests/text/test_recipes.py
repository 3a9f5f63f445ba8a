"""The corpus of recipes: the same everywhere, and what its splits hold."""

import hashlib

from transformer_jax.text.corpora import recipes
from transformer_jax.text.corpus import Corpus

SPLITS = ("train", "validation", "test")
DIGEST = "2de8a44d8b45ac3b05d306fca27ee4dd31a7cb021768bd131831a13b61d734d0"
"""SHA-256 of all recipes: results that were measured on the corpus hold for this one only."""


def test_splits_have_the_promised_sizes_and_digest() -> None:
    assert [len(recipes.load(split)) for split in SPLITS] == [8000, 500, 1000]
    every = [recipe for split in SPLITS for recipe in recipes.load(split)]
    assert len({recipe.source for recipe in every}) == len(every)
    text = "".join(f"{source}\t{target}\n" for source, target in every)
    assert hashlib.sha256(text.encode()).hexdigest() == DIGEST


def test_it_is_a_corpus() -> None:
    assert list(Corpus("recipes", split="validation").pairs()) == recipes.load("validation")
    assert list(Corpus("recipes:test").pairs()) == recipes.load("test")
    assert Corpus("recipes", "test").digest != Corpus("grammar", "test").digest
