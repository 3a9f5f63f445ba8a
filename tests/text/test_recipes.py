"""The corpus of recipes: what its splits hold, and that only order tells trigger from action."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable

import pytest

from transformer_jax.config import TokenizerConfig
from transformer_jax.text import tokenizer
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


def test_unknown_split_is_one_line_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"^split 'dev': must be one of train, validation, test$"):
        recipes.load("dev")


def test_it_is_a_corpus() -> None:
    assert list(Corpus("recipes", split="validation").pairs()) == recipes.load("validation")
    assert list(Corpus("recipes:test").pairs()) == recipes.load("test")
    assert Corpus("recipes", "test").digest != Corpus("grammar", "test").digest


def test_both_services_are_named_once() -> None:
    for recipe in recipes.load("test"):
        assert sorted(named(recipe.source.split())) == sorted(joined(recipe))


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


def test_labels_are_tokens() -> None:
    words = TokenizerConfig(kind="word", joint=False)
    target = tokenizer.train(recipes.load("train"), words).target
    assert {*target.pieces(range(4, target.size))} == {f"▁{label}" for label in ROLES}
    for recipe in recipes.load("test")[:9]:
        ids = target.encode(recipe.target)
        assert len(ids) == 2
        assert target.decode(ids) == recipe.target


def named(words: list[str]) -> list[str]:
    return [word for word in words if word in SERVICES]


def function_words(words: list[str]) -> list[str]:
    """The words but verbs, owners and those that belong to a service; a service's name is `_`."""
    nouns = {word for service in recipes.SERVICES for word in (service.place, *service.things)}
    content = nouns | {"my", "your", *recipes.VERBS}
    return ["_" if word in SERVICES else word for word in words if word.lower() not in content]


def nothing(words: list[str]) -> tuple[str, Hashable]:
    return named(words)[0], None


def bag(words: list[str]) -> tuple[str, Hashable]:
    """All clues except word order: the frame's words, and which service its nouns belong to."""
    one, other = (SERVICES[name] for name in sorted(named(words)))
    belongs = (one.place in words, other.place in words, not {*one.things}.isdisjoint(words))
    return one.name, (*sorted(function_words(words)), *belongs)


def places(words: list[str]) -> tuple[str, Hashable]:
    return named(words)[0], tuple(i for i, word in enumerate(words) if word in SERVICES)


def order(words: list[str]) -> tuple[str, Hashable]:
    return named(words)[0], tuple(function_words(words))


@pytest.mark.parametrize(
    ("view", "least", "most"),
    [(nothing, 0.45, 0.55), (bag, 0.45, 0.6), (places, 0.5, 0.7), (order, 1.0, 1.0)],
)
def test_only_function_words_in_their_order_tell_trigger_from_action(
    view: Callable[[list[str]], tuple[str, Hashable]], least: float, most: float
) -> None:
    """The accuracy of the best rule on a view, learned by counting: is this service the trigger?"""
    counts: dict[Hashable, Counter[bool]] = defaultdict(Counter)
    for recipe in recipes.load("train"):
        service, seen = view(recipe.source.split())
        counts[seen][service == joined(recipe)[0]] += 1
    right = 0
    for recipe in recipes.load("test"):
        service, seen = view(recipe.source.split())
        rule = counts[seen][True] > counts[seen][False]
        right += rule == (service == joined(recipe)[0])
    assert least <= right / 1000 <= most, right
