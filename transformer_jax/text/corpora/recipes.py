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

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, TypeVar

from transformer_jax.errors import UserError
from transformer_jax.text.corpora.grammar import Pair

T = TypeVar("T")

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
    things: tuple[str, ...]


_SERVICES = """
    Dropbox    new_file     save_file     folder       files documents
    Evernote   new_note     create_note   notebook     notes memos
    Feedly     new_story    add_story     feed         stories headlines news
    Flickr     new_image    upload_image  album        images slides
    Gmail      new_email    send_email    inbox        emails letters
    Instagram  new_photo    post_photo    account      photos pictures snapshots
    Pocket     new_article  save_article  library      articles links bookmarks
    Reddit     new_thread   submit_thread profile      posts threads
    Sheets     new_row      add_row       spreadsheet  rows entries
    Slack      new_message  post_message  workspace    messages comments
    Spotify    new_track    add_track     playlist     tracks songs
    Todoist    new_task     create_task   list         tasks reminders
    Trello     new_card     create_card   board        cards tickets
    Tumblr     new_quote    post_quote    blog         quotes drafts
    Twitter    new_tweet    post_tweet    timeline     tweets updates
    YouTube    new_video    upload_video  channel      videos clips
"""


def _service(name: str, trigger: str, action: str, place: str, *things: str) -> Service:
    prefix = name.lower()
    return Service(name, f"{prefix}.{trigger}", f"{prefix}.{action}", place, things)


SERVICES = tuple(_service(*line.split()) for line in _SERVICES.strip().splitlines())

_FRAMES = (
    "V x O to Y",
    "V O from X to Y",
    "V O in X to Y",
    "from X to Y V new O",
    "let X send O to Y",
    "use O in X to update Y",
    "W X has new O V them to Y",
    "W there are new O in X V them to Y",
    "V O to Y from X",
    "V to Y O in X",
    "to Y from X V new O",
    "let Y get O from X",
    "fill Y with O from X",
    "update Y W X has new O",
    "V O to Y W X has new ones",
    "V to Y W there are new O in X",
)
"""X: the trigger's service, x: without its place; Y: the action's service; O: things of either
service with equal probability; V: verb; W: conjunction. X is first in half of the frames."""

VERBS = ("save", "autosave", "copy", "send", "add", "post", "share", "push", "forward", "sync")
_CONJUNCTIONS = ("when", "whenever", "if", "every time", "as soon as")
_OWNERS = ("", "my ", "your ")


def load(split: str) -> list[Pair]:
    """Returns the recipes of a split as pairs of sentence and labels.

    UserError: the split is not "train", "validation" or "test".
    """
    splits = _splits()
    if split not in splits:
        raise UserError(f"split {split!r}: must be one of {', '.join(splits)}")
    return list(splits[split])


@cache
def _splits() -> dict[str, list[Pair]]:
    writer = _Writer(random.Random(_SEED))
    couples = list(itertools.combinations(SERVICES, 2))
    rest = iter(sorted(couples, key=lambda _: writer.random()))
    chosen = {name: list(itertools.islice(rest, count)) for name, count in _COUPLES.items()}
    chosen["train"] = list(rest)
    return {name: writer.recipes(chosen[name], count) for name, count in _SIZES.items()}


class _Writer:
    """Draws recipes."""

    def __init__(self, rng: random.Random) -> None:
        self.random = rng.random  # Python promises never to change this sequence

    def recipes(self, couples: Sequence[tuple[Service, Service]], count: int) -> list[Pair]:
        """Returns `count` distinct recipes, each for one of the pairs of services."""
        found: dict[str, str] = {}
        while len(found) < count:
            one, other = self._pick(couples)
            trigger, action = (one, other) if self.random() < 0.5 else (other, one)
            found[self._sentence(trigger, action)] = f"{trigger.trigger} {action.action}"
        return [Pair(*recipe) for recipe in found.items()]

    def _sentence(self, trigger: Service, action: Service) -> str:
        slots = {
            "X": self._mention(trigger),
            "x": self._pick(_OWNERS) + trigger.name,
            "Y": self._mention(action),
            "O": self._pick(self._pick((trigger, action)).things),
            "V": self._pick(VERBS),
            "W": self._pick(_CONJUNCTIONS),
        }
        text = " ".join(slots.get(token, token) for token in self._pick(_FRAMES).split())
        return text[0].upper() + text[1:]

    def _mention(self, service: Service) -> str:
        place = f" {service.place}" if self.random() < 0.5 else ""
        return self._pick(_OWNERS) + service.name + place

    def _pick(self, items: Sequence[T]) -> T:
        return items[int(self.random() * len(items))]
