"""The built-in corpus of recipes: sentences about two services, with trigger and action as labels.

"Save Instagram photos to my Dropbox folder" has the labels `instagram.new_photo dropbox.save_file`,
"Post photos in your Dropbox folder to Instagram" has `dropbox.new_file instagram.post_photo` (the
task of Chen et al. 2016). The corpus is the same at every call and on every machine.

Only the positions of words such as "to" and "whenever" tell which of the two services is the
trigger; services, verbs and things do not. The first service is the trigger in half of the recipes.
The best rule without word order is right for 53 % of them, and the best rule that knows the
positions of the two services for 66 %. The pairs of services in validation and test never occur in
training.
"""

import itertools
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from transformer_jax.text.corpora.draw import Draw, Pair, as_text, read_data, split_of

_SEED = 1611
_SIZES = {"train": 8000, "validation": 500, "test": 1000}
_COUPLES = {"validation": 12, "test": 24}
"""How many of the 120 pairs of services are held out of training, in both orders."""


class Service(NamedTuple):
    """A service: its labels as trigger and as action, its things and the place that holds them."""

    name: str
    trigger: str
    action: str
    place: str
    things: list[str]


_DATA = read_data("recipes.json")
SERVICES = [Service(**service) for service in _DATA["services"]]
VERBS: list[str] = _DATA["verbs"]
_FRAMES: list[list[str]] = [frame.split() for frame in _DATA["frames"]]
"""X: the trigger's service, x: without its place; Y: the action's service; O: things of either
service with equal probability; V: verb; W: conjunction. X is first in half of the frames."""


def load(split: str) -> list[Pair]:
    """Returns the recipes of a split as pairs of sentence and labels.

    UserError: the split is not "train", "validation" or "test".
    """
    return split_of(_splits(), split)


@cache
def _splits() -> dict[str, list[Pair]]:
    draw = Draw(_SEED)
    rest = iter(draw.shuffled(list(itertools.combinations(SERVICES, 2))))
    couples = {name: list(itertools.islice(rest, count)) for name, count in _COUPLES.items()}
    couples["train"] = list(rest)
    return {name: _recipes(draw, couples[name], count) for name, count in _SIZES.items()}


def _recipes(draw: Draw, couples: Sequence[tuple[Service, Service]], count: int) -> list[Pair]:
    """Returns `count` distinct recipes, each for one of the pairs of services."""
    labels: dict[str, str] = {}
    while len(labels) < count:
        one, other = draw.pick(couples)
        trigger, action = (one, other) if draw.random() < 0.5 else (other, one)
        labels[_sentence(draw, trigger, action)] = f"{trigger.trigger} {action.action}"
    return list(itertools.starmap(Pair, labels.items()))


def _sentence(draw: Draw, trigger: Service, action: Service) -> str:
    slots = {
        "X": _mention(draw, trigger),
        "x": draw.pick(_DATA["owners"]) + trigger.name,
        "Y": _mention(draw, action),
        "O": draw.pick(draw.pick((trigger, action)).things),
        "V": draw.pick(VERBS),
        "W": draw.pick(_DATA["conjunctions"]),
    }
    return as_text([slots.get(token, token) for token in draw.pick(_FRAMES)])


def _mention(draw: Draw, service: Service) -> str:
    place = f" {service.place}" if draw.random() < 0.5 else ""
    return draw.pick(_DATA["owners"]) + service.name + place
