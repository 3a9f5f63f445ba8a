"""The built-in corpus of English sentences and their German translations, made by a grammar.

A sentence consists of a frame, which is two templates with the same slots, each in the word order
of its language, and of words from `lexicon`. The corpus is the same at every call and on every
machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import NamedTuple, TypeVar

from transformer_jax.errors import UserError
from transformer_jax.text.corpora.lexicon import (
    ADJECTIVES,
    CONJUNCTIONS,
    DETERMINERS,
    NOUNS,
    PREPOSITIONS,
    PRESENTS,
    PRONOUNS,
    STATES,
    TIMES,
    VERBS,
    Adjective,
    Noun,
    Present,
    Pronoun,
    Verb,
    Words,
)

T = TypeVar("T")
L = TypeVar("L", Adjective, Noun, Present, Verb)

_SEED = 2017
_SIZES = {"train": 20_000, "validation": 500, "test_seen": 400}
_NEW = 100
"""Number of test sentences with a lemma in a frame where it never occurs in training."""
_HELD_OUT = 5
"""Number of lemmas for each frame that never occur in it in training."""
_PLURALS = 0.4
_ADJECTIVES = 0.45
"""Fractions of noun phrases that are plural and that have an adjective."""

_FRAMES = {
    "statement": ("S V:present M T:present .", "S V:present T:present M V:prefix ."),
    "fronted": ("T:present S V:present M .", "T:present V:present S M V:prefix ."),
    "question": ("do S V:base M T:present ?", "V:present S T:present M V:prefix ?"),
    "wish": ("S wish V:base M T:future .", "S wish T:future M V:base ."),
    "why": ("why modal S V:base M ?", "warum modal S M V:base ?"),
    "future": ("T:future S will V:base M .", "T:future will S M V:base ."),
    "perfect": ("S have V:participle M .", "S have M V:participle ."),
    "done": ("have S V:participle M ?", "have S M V:participle ?"),
    "past": ("T:past S V:past M .", "T:past have S M V:participle ."),
    "that": ("s opinion that S V:present M .", "s opinion , dass S M V:final ."),
    "duty": ("s opinion that S modal V:base M .", "s opinion , dass S M V:base modal ."),
    "because": ("s be A because S V:past M .", "s be A , weil S M V:participle have ."),
    "condition": ("C S V:present M , s v:present .", "C S M V:final , v:present s v:prefix ."),
    "relative": ("S R V:present M be A .", "S , R M V:final , be A ."),
}
"""English and German templates. The slots: S subject; V verb; M the verb's objects and adjuncts; T
time; s and v subject and verb of another clause; A adjective of feeling; C conjunction; R relative
pronoun; and the names of `PRESENTS`. Other tokens are text."""

_TEMPLATES = {
    frame: (tuple(english.split()), tuple(german.split()))
    for frame, (english, german) in _FRAMES.items()
}
_DETERMINERS = DETERMINERS[:2] + DETERMINERS  # "the" and "a" are the most frequent
_INTRANSITIVE = [verb for verb in VERBS if not (verb.dative or verb.objects or verb.motion)]
_NUMBER = {"1": 0, "m": 1, "f": 1, "n": 1, "p": 2}
"""The index in `Present.forms` of the form that agrees with a subject of each kind."""
_CONTRACTIONS = {"in dem": "im", "in das": "ins", "zu dem": "zum", "zu der": "zur"}


class Pair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


class Sentence(NamedTuple):
    """A pair with its frame and lemmas. `reordered`: German has its slots in another order."""

    pair: Pair
    frame: str
    lemmas: tuple[str, ...]
    reordered: bool


class _Phrase(NamedTuple):
    """A noun phrase or a pronoun, with a `kind` as in `Pronoun` and the category of its noun."""

    words: Words
    kind: str
    category: str


def load(split: str) -> list[Pair]:
    """Returns the pairs of a split: "train", "validation" or "test".

    "test" consists of "test_seen", where every lemma may occur in the sentence's frame in training,
    and "test_new", where each sentence has a lemma that never does.

    UserError: there is no such split.
    """
    return [sentence.pair for sentence in sentences(split)]


def sentences(split: str) -> list[Sentence]:
    """Returns the sentences whose pairs `load` returns. Raises the same error."""
    splits = _splits()
    if split not in splits:
        raise UserError(f"split {split!r}: must be one of {', '.join(splits)}")
    return list(splits[split])


def frames() -> list[str]:
    """Returns the names of the frames."""
    return list(_TEMPLATES)


def lemmas() -> list[str]:
    """Returns all nouns, verbs and adjectives in English."""
    return [
        *(noun.lemma for nouns in NOUNS.values() for noun in nouns),
        *(verb.lemma for verb in VERBS),
        *(opinion.lemma for opinion in PRESENTS["opinion"]),
        *dict.fromkeys(adjective.lemma for some in ADJECTIVES.values() for adjective in some),
    ]


def sample(seed: int) -> Iterator[Sentence]:
    """Yields random sentences of the grammar without end."""
    rng = random.Random(seed)
    while True:
        sentence = _Writer(rng).sentence()
        if len({*sentence.lemmas}) == len(sentence.lemmas):  # no "the dog sees the dog"
            yield sentence


@cache
def _splits() -> dict[str, list[Sentence]]:
    ordinary, new = _draw(sum(_SIZES.values()))
    rest = iter(ordinary)
    splits = {name: list(islice(rest, size)) for name, size in _SIZES.items()}
    return {**splits, "test_new": new, "test": splits["test_seen"] + new}


def _draw(count: int) -> tuple[list[Sentence], list[Sentence]]:
    """Returns distinct sentences: `count` without and `_NEW` with a lemma held out of its frame."""
    held_out = _held_out()
    drawn: set[str] = set()
    ordinary: list[Sentence] = []
    new: list[Sentence] = []
    for sentence in sample(_SEED):
        if len(ordinary) >= count and len(new) >= _NEW:
            break
        if sentence.pair.source not in drawn:
            drawn.add(sentence.pair.source)
            known = held_out[sentence.frame].isdisjoint(sentence.lemmas)
            (ordinary if known else new).append(sentence)
    return ordinary[:count], new[:_NEW]


def _held_out() -> dict[str, set[str]]:
    """Returns the lemmas held out of each frame in training; each is held out of one frame only."""
    rng = random.Random(_SEED)
    few_frames = {opinion.lemma for opinion in PRESENTS["opinion"]}
    candidates = (lemma for lemma in lemmas() if lemma not in few_frames)
    shuffled = iter(sorted(candidates, key=lambda _: rng.random()))
    return {frame: set(islice(shuffled, _HELD_OUT)) for frame in _TEMPLATES}


class _Writer:
    """Draws the words of one sentence and records their lemmas."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.random  # Python promises never to change this sequence
        self._lemmas: list[str] = []

    def sentence(self) -> Sentence:
        """Returns a sentence in a random frame."""
        frame = self._pick(frames())
        english, german = _TEMPLATES[frame]
        slots = self._slots(english, german)
        source = [slots[token].english if token in slots else token for token in english]
        target = [slots[token].german if token in slots else token for token in german]
        filled = tuple(token for token, text in zip(german, target, strict=True) if text)
        pair = Pair(_text(source), _text(target))
        return Sentence(pair, frame, tuple(self._lemmas), _reordered(english, filled))

    def _slots(self, english: tuple[str, ...], german: tuple[str, ...]) -> dict[str, Words]:
        """Returns the words in the slots of a frame."""
        verb = self._word(VERBS)
        # "I" is never the subject of these verbs: each of their forms for it would be rare.
        finite = "V:present" in german or "V:final" in german
        pronouns = PRONOUNS[1:] if finite else PRONOUNS
        subject = other = self._subject(verb.subjects, pronouns, 0.0 if "R" in english else 0.2)
        slots = {"S": subject.words, **_forms("V", verb, subject.kind)}
        if "s" in english:
            pronouns = PRONOUNS[1:] if "v:present" in english else PRONOUNS
            other = self._subject(("person",), pronouns, 0.4, adjectives=0.2)
            slots["s"] = other.words
        if "v:present" in english:
            slots |= _forms("v", self._word(_INTRANSITIVE), other.kind)
        two_clauses = "s" in english or "R" in english
        slots["M"] = self._middle(verb, adjuncts=0.3 if two_clauses else 0.75)
        return {
            **slots,
            **self._times(english),
            **self._presents(english + german, verb, subject.kind, other.kind),
            **self._function_words(english, subject),
        }

    def _subject(
        self,
        categories: tuple[str, ...],
        pronouns: Sequence[Pronoun],
        share: float,
        adjectives: float = _ADJECTIVES,
    ) -> _Phrase:
        """Returns a pronoun with probability `share`, and a noun phrase otherwise."""
        if self._random() < share:
            pronoun = self._pick(pronouns)
            return _Phrase(pronoun.words, pronoun.kind, "person")
        return self._noun_phrase(categories, "n", adjectives)

    def _noun_phrase(
        self, categories: tuple[str, ...], case: str, adjectives: float = _ADJECTIVES
    ) -> _Phrase:
        noun = self._word(_nouns(categories))
        determiner = self._pick(_DETERMINERS)
        plural = self._random() < _PLURALS
        kind = "p" if plural else noun.gender
        english = [determiner.english[plural], noun.english[plural]]
        german = [determiner.german[case + kind], noun.inflect(case, plural)]
        if self._random() < adjectives:
            adjective = self._word(ADJECTIVES[noun.category])
            english.insert(1, adjective.words.english)
            german.insert(1, adjective.stem + determiner.endings[case + kind])
        if english[0] == "a" and english[1][0] in "aeiou":
            english[0] = "an"
        return _Phrase(Words(" ".join(english), " ".join(german)), kind, noun.category)

    def _middle(self, verb: Verb, adjuncts: float) -> Words:
        """Returns the verb's objects and adjuncts."""
        phrases: list[_Phrase] = []
        if verb.dative:
            phrases.append(self._noun_phrase(verb.dative, "d"))
        if verb.objects:
            phrases.append(self._noun_phrase(verb.objects, "a"))
        if verb.motion:
            phrases.append(self._with_preposition("direction", "place"))
        elif not phrases or (len(phrases) == 1 and self._random() < adjuncts):
            phrases.append(self._adjunct(verb, phrases[0].category if phrases else ""))
        return Words(
            " ".join(phrase.words.english for phrase in phrases),
            " ".join(phrase.words.german for phrase in phrases),
        )

    def _adjunct(self, verb: Verb, category: str) -> _Phrase:
        """Returns a phrase of place, benefit or company.

        `category` is that of the object, or empty if there is none.
        """
        if verb.benefit and category not in ("person", "animal") and self._random() < 0.4:
            return self._with_preposition("benefit", "person")
        if category != "place" and self._random() < (0.7 if category else 0.5):
            return self._with_preposition("place", "place")
        pet = not category and self._random() < 0.7
        return self._with_preposition("company", "animal" if pet else "person")

    def _with_preposition(self, sense: str, category: str) -> _Phrase:
        preposition = self._pick(PREPOSITIONS[sense])
        phrase = self._noun_phrase((category,), preposition.case)
        first, determiner, rest = f"{preposition.words.german} {phrase.words.german}".split(" ", 2)
        both = f"{first} {determiner}"
        words = Words(
            f"{preposition.words.english} {phrase.words.english}",
            f"{_CONTRACTIONS.get(both, both)} {rest}",
        )
        return phrase._replace(words=words)

    def _times(self, english: tuple[str, ...]) -> dict[str, Words]:
        """Returns times: always for a slot at the beginning, with probability 0.5 for others."""
        slots: dict[str, Words] = {}
        for tense, times in TIMES.items():
            slot = f"T:{tense}"
            if slot in english:
                time = Words("", "")
                if slot == english[0] or self._random() < 0.5:
                    time = self._pick(times)
                    self._lemmas.append(time.english)
                slots[slot] = time
        return slots

    def _presents(
        self, tokens: tuple[str, ...], verb: Verb, subject: str, other: str
    ) -> dict[str, Words]:
        """Returns the verbs of `PRESENTS`, each in agreement with its subject."""
        slots: dict[str, Words] = {}
        for name in PRESENTS:
            if name in tokens:
                kind = other if name in ("be", "opinion") else subject
                slots[name] = self._word(PRESENTS[name]).forms[_NUMBER[kind]]
        if "have" in slots:  # German forms the perfect with one of two auxiliaries
            auxiliary = PRESENTS[verb.perfect][0].forms[_NUMBER[subject]]
            slots["have"] = Words(slots["have"].english, auxiliary.german)
        return slots

    def _function_words(self, english: tuple[str, ...], subject: _Phrase) -> dict[str, Words]:
        slots: dict[str, Words] = {}
        if "A" in english:
            slots["A"] = self._word(STATES).words
        if "C" in english:
            slots["C"] = self._pick(CONJUNCTIONS)
        if "R" in english:
            pronoun = "who" if subject.category == "person" else "that"
            slots["R"] = Words(pronoun, DETERMINERS[0].german["n" + subject.kind])
        return slots

    def _word(self, words: Sequence[L]) -> L:
        """Returns one of the words, and records its lemma."""
        word = self._pick(words)
        self._lemmas.append(word.lemma)
        return word

    def _pick(self, items: Sequence[T]) -> T:
        return items[int(self._random() * len(items))]


@cache
def _nouns(categories: tuple[str, ...]) -> list[Noun]:
    """Returns the nouns of some categories.

    Neuter persons are listed three times: there are only two, and forms such as "kluges" occur with
    no other noun.
    """
    nouns = [noun for category in categories for noun in NOUNS[category]]
    return nouns + 2 * [n for n in nouns if n.category == "person" and n.gender == "n"]


def _forms(slot: str, verb: Verb, kind: str) -> dict[str, Words]:
    return {f"{slot}:{name}": words for name, words in verb.forms[kind == "p"].items()}


def _text(words: list[str]) -> str:
    """Returns the words as a sentence, without spaces before punctuation marks."""
    text = " ".join(word for word in words if word)
    for mark in ",.?":
        text = text.replace(f" {mark}", mark)
    return text[0].upper() + text[1:]


@cache
def _reordered(english: tuple[str, ...], german: tuple[str, ...]) -> bool:
    """Returns whether the slots of both languages are in different orders."""
    names = [token.partition(":")[0] for token in english]
    order = [names.index(name) for token in german if (name := token.partition(":")[0]) in names]
    return order != sorted(order)
