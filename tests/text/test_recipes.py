"""The corpus of recipes: the same everywhere, and what its splits hold."""

import hashlib

from transformer_jax.text.corpora import recipes
from transformer_jax.text.corpora.grammar import Pair
from transformer_jax.text.corpus import Corpus

SPLITS = ("train", "validation", "test")
DIGEST = "2de8a44d8b45ac3b05d306fca27ee4dd31a7cb021768bd131831a13b61d734d0"
"""SHA-256 of all recipes: results that were measured on the corpus hold for this one only."""

SERVICES = {service.name: service for service in recipes.SERVICES}
ROLES = {
    label: (service.name, role)
    for service in recipes.SERVICES
    for role, label in (("trigger", service.trigger), ("action", service.action))
}


def joined(recipe: Pair) -> tuple[str, str]:
    """The names of the trigger's and the action's service."""
    (trigger, first), (action, second) = (ROLES[label] for label in recipe.target.split())
    assert (first, second) == ("trigger", "action")
    return trigger, action


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


def test_training_knows_each_service_in_both_roles_but_not_what_is_held_out() -> None:
    couples = {split: {joined(recipe) for recipe in recipes.load(split)} for split in SPLITS}
    for roles in zip(*couples["train"], strict=True):
        assert {*roles} == {*SERVICES}
    for split, count in (("validation", 12), ("test", 24)):
        assert couples[split] == {(b, a) for a, b in couples[split]}, "both roles of a couple"
        assert len(couples[split]) == 2 * count
        assert not couples[split] & couples["train"]
    assert not couples["validation"] & couples["test"]
    words = {word for recipe in recipes.load("train") for word in recipe.source.split()}
    assert words >= {word for recipe in recipes.load("test") for word in recipe.source.split()}
