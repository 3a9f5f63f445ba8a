"""The built-in corpus of English sentences and their German translations, made by a grammar.

A sentence consists of a frame, which is two templates with the same slots, each in the word order
of its language, and of words from `lexicon`. The corpus is the same at every call and on every
machine.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, islice
from typing import NamedTuple, TypeVar

from transformer_jax.text.corpora import lexicon
from transformer_jax.text.corpora.draw import Draw, Pair, as_text, split_of
from transformer_jax.text.corpora.lexicon import Noun, Phrase, Present, Verb, Words

L = TypeVar("L", Noun, Present, Verb, Words)

_SEED = 2017
_SIZES = {"train": 20_000, "validation": 500, "test_seen": 400}
_NEW = 100
"""Number of test sentences with a lemma in a frame where it never occurs in training."""
_HELD_OUT = 5
"""Number of lemmas for each frame that never occur in it in training."""
_PLURALS = 0.4
_ADJECTIVES = 0.45
"""Fractions of noun phrases that are plural and that have an adjective."""

_DETERMINERS = lexicon.DETERMINERS[:2] + lexicon.DETERMINERS  # "the" and "a" are the most frequent
_INTRANSITIVE = [v for v in lexicon.VERBS if not (v.dative or v.objects or v.motion)]
_CONTRACTIONS = {"in dem ": "im ", "in das ": "ins ", "zu dem ": "zum ", "zu der ": "zur "}


class Sentence(NamedTuple):
    """A pair with its frame and lemmas."""

    pair: Pair
    frame: str
    lemmas: tuple[str, ...]


def load(split: str) -> list[Pair]:
    """Returns the pairs of a split: "train", "validation" or "test".

    "test" consists of "test_seen", where every lemma may occur in the sentence's frame in training,
    and "test_new", where each sentence has a lemma that never does.

    UserError: there is no such split.
    """
    return [sentence.pair for sentence in sentences(split)]


def sentences(split: str) -> list[Sentence]:
    """Returns the sentences whose pairs `load` returns. Raises the same error."""
    return split_of(_splits(), split)


def lemmas() -> list[str]:
    """Returns all nouns, verbs and adjectives in English."""
    inflected = [*chain(*lexicon.NOUNS.values()), *lexicon.VERBS, *lexicon.PRESENTS["opinion"]]
    adjectives = dict.fromkeys(chain(*lexicon.ADJECTIVES.values()))
    return [word.english[0] for word in inflected] + [word.english for word in adjectives]


def sample(seed: int) -> Iterator[Sentence]:
    """Yields random sentences of the grammar without end."""
    draw = Draw(seed)
    while True:
        sentence = _Writer(draw).sentence()
        if len({*sentence.lemmas}) == len(sentence.lemmas):  # no "the dog sees the dog"
            yield sentence


@cache
def _splits() -> dict[str, list[Sentence]]:
    """Returns distinct sentences. Only those of "test_new" have a lemma held out of their frame."""
    held_out, size = _held_out(), sum(_SIZES.values())
    ordinary: dict[str, Sentence] = {}
    new: dict[str, Sentence] = {}
    for sentence in sample(_SEED):
        seen = held_out[sentence.frame].isdisjoint(sentence.lemmas)
        (ordinary if seen else new).setdefault(sentence.pair.source, sentence)
        if len(ordinary) >= size and len(new) >= _NEW:
            break
    rest = iter(ordinary.values())
    splits = {name: list(islice(rest, count)) for name, count in _SIZES.items()}
    splits["test_new"] = list(new.values())[:_NEW]
    return splits | {"test": splits["test_seen"] + splits["test_new"]}


def _held_out() -> dict[str, set[str]]:
    """Returns the lemmas held out of each frame in training; each is held out of one frame only."""
    opinions = {verb.english[0] for verb in lexicon.PRESENTS["opinion"]}  # in two frames only
    shuffled = iter(Draw(_SEED).shuffled([word for word in lemmas() if word not in opinions]))
    return {frame: set(islice(shuffled, _HELD_OUT)) for frame in lexicon.FRAMES}


class _Writer:
    """Draws the words of one sentence and records their lemmas."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._lemmas: list[str] = []

    def sentence(self) -> Sentence:
        """Returns a sentence in a random frame."""
        frame = self._draw.pick(list(lexicon.FRAMES))
        english, german = lexicon.FRAMES[frame]
        slots = self._slots(english, german)
        source = as_text([slots[token].english if token in slots else token for token in english])
        target = as_text([slots[token].german if token in slots else token for token in german])
        return Sentence(Pair(source, target), frame, tuple(self._lemmas))

    def _slots(self, english: list[str], german: list[str]) -> dict[str, Words]:
        """Returns the words in the slots of a frame."""
        verb = self._word(lexicon.VERBS)
        # "I" is never the subject of these verbs: each of their forms for it would be rare.
        with_i = not ("V:present" in german or "V:final" in german)
        share = 0.0 if "R" in english else 0.2
        subject = other = self._subject(verb.subjects, with_i, share, _ADJECTIVES)
        slots = {"S": subject.words, **verb.forms("V", subject.kind)}
        if "s" in english:
            other = self._subject("person", "v:present" not in english, 0.4, adjectives=0.2)
            slots["s"] = other.words
        if "v:present" in english:
            slots |= self._word(_INTRANSITIVE).forms("v", other.kind)
        two_clauses = "s" in english or "R" in english
        slots["M"] = self._middle(verb, adjuncts=0.3 if two_clauses else 0.75)
        for tense, times in lexicon.TIMES.items():
            slot = f"T:{tense}"
            if slot in english:  # always filled at the beginning of a sentence
                shown = slot == english[0] or self._draw.random() < 0.5
                slots[slot] = self._word(times) if shown else Words("", "")
        for name, verbs in lexicon.PRESENTS.items():
            if name in english or name in german:
                kind = other.kind if name in ("be", "opinion") else subject.kind
                slots[name] = self._word(verbs).form(kind)
        if "have" in slots:  # German forms the perfect with one of two auxiliaries
            auxiliary = lexicon.PRESENTS[verb.perfect][0].form(subject.kind)
            slots["have"] = Words(slots["have"].english, auxiliary.german)
        if "A" in english:
            slots["A"] = self._word(lexicon.STATES)
        if "C" in english:
            slots["C"] = self._draw.pick(lexicon.CONJUNCTIONS)
        if "R" in english:
            pronoun = "who" if subject.category == "person" else "that"
            slots["R"] = Words(pronoun, lexicon.DETERMINERS[0].german["n"][subject.kind])
        return slots

    def _subject(self, nouns: str, with_i: bool, share: float, adjectives: float) -> Phrase:
        """Returns a pronoun with probability `share`, and a noun phrase otherwise."""
        if self._draw.random() < share:
            return self._draw.pick(lexicon.PRONOUNS if with_i else lexicon.PRONOUNS[1:])
        return self._noun_phrase(nouns, "n", adjectives)

    def _noun_phrase(self, categories: str, case: str, adjectives: float = _ADJECTIVES) -> Phrase:
        noun = self._word(_nouns(categories))
        determiner = self._draw.pick(_DETERMINERS)
        plural = self._draw.random() < _PLURALS
        kind = "p" if plural else noun.gender
        english = [determiner.english[plural], noun.english[plural]]
        german = [determiner.german[case][kind], noun.inflect(case, plural)]
        if self._draw.random() < adjectives:
            adjective = self._word(lexicon.ADJECTIVES[noun.category])
            english.insert(1, adjective.english)
            german.insert(1, adjective.german.removesuffix("e") + determiner.endings[case][kind])
        if english[0] == "a" and english[1][0] in "aeiou":
            english[0] = "an"
        return Phrase(Words(" ".join(english), " ".join(german)), kind, noun.category)

    def _middle(self, verb: Verb, adjuncts: float) -> Words:
        """Returns the verb's objects and adjuncts."""
        phrases: list[Phrase] = []
        if verb.dative:
            phrases.append(self._noun_phrase(verb.dative, "d"))
        if verb.objects:
            phrases.append(self._noun_phrase(verb.objects, "a"))
        if verb.motion:
            phrases.append(self._with_preposition("direction", "place"))
        elif not phrases or (len(phrases) == 1 and self._draw.random() < adjuncts):
            phrases.append(self._adjunct(verb, phrases[0].category if phrases else ""))
        return Words(*map(" ".join, zip(*(phrase.words for phrase in phrases), strict=True)))

    def _adjunct(self, verb: Verb, category: str) -> Phrase:
        """Returns a phrase of place, benefit or company.

        `category` is that of the object, or empty if there is none.
        """
        if verb.benefit and category not in ("person", "animal") and self._draw.random() < 0.4:
            return self._with_preposition("benefit", "person")
        if category != "place" and self._draw.random() < (0.7 if category else 0.5):
            return self._with_preposition("place", "place")
        pet = not category and self._draw.random() < 0.7
        return self._with_preposition("company", "animal" if pet else "person")

    def _with_preposition(self, sense: str, category: str) -> Phrase:
        english, german, case = self._draw.pick(lexicon.PREPOSITIONS[sense])
        phrase = self._noun_phrase(category, case)
        german = f"{german} {phrase.words.german}"
        for separate, contracted in _CONTRACTIONS.items():
            german = german.replace(separate, contracted)
        return phrase._replace(words=Words(f"{english} {phrase.words.english}", german))

    def _word(self, words: Sequence[L]) -> L:
        """Returns one of the words, and records its lemma."""
        word = self._draw.pick(words)
        self._lemmas.append(word.english if isinstance(word, Words) else word.english[0])
        return word


@cache
def _nouns(categories: str) -> list[Noun]:
    """Returns the nouns of some categories.

    Neuter persons are listed three times: there are only two, and forms such as "kluges" occur with
    no other noun.
    """
    nouns = [noun for category in categories.split() for noun in lexicon.NOUNS[category]]
    return nouns + 2 * [n for n in nouns if n.category == "person" and n.gender == "n"]
