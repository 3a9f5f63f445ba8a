"""The frames and words of the built-in corpus, which are in grammar.json, and German inflection.

Each English word has one translation and no English form belongs to two words, so that sentences
are unambiguous. For that reason there is no "you", "it" or "her", no noun with the same singular
and plural, such as "sheep", and no verb with the same present and past, such as "read".

Cases are "n", "a" and "d" (nominative, accusative, dative). A kind is what articles and adjectives
agree with: a gender, "m", "f" or "n", or "p" for any plural. Words that take nouns name the
categories of these, such as "person animal".
"""

from typing import NamedTuple

from transformer_jax.text.corpora.draw import read_data


class Words(NamedTuple):
    """Words of the same meaning in both languages; empty if a language has none."""

    english: str
    german: str


class Phrase(NamedTuple):
    """A noun phrase or a pronoun, with its kind ("1" is "I") and the category of its noun."""

    words: Words
    kind: str
    category: str


class Noun(NamedTuple):
    """A noun: its singular and plural in each language.

    A `weak` one has the form of the plural in all cases but the nominative (der Junge, den Jungen).
    """

    category: str
    english: list[str]
    german: list[str]
    gender: str
    weak: bool = False

    def inflect(self, case: str, plural: bool) -> str:
        """Returns the German form."""
        if plural and case == "d" and self.german[1][-1] not in "ns":
            return self.german[1] + "n"
        return self.german[plural or (self.weak and case != "n")]


class Determiner(NamedTuple):
    """A determiner: its singular and plural, and by case and kind its German forms and the endings
    of an adjective after it. The plural of "a" is "two"."""

    english: list[str]
    german: dict[str, dict[str, str]]
    endings: dict[str, dict[str, str]]


class Verb(NamedTuple):
    """A verb and its complements.

    english: base, third person, past and participle. german: infinitive, third person and
    participle, all without the prefix, which is separate in a main clause and joined to the verb at
    the end of a subordinate one. perfect: the auxiliary of the German perfect, "have" or "be".
    subjects, dative, objects: categories; an object in the dative precedes one in the accusative.
    motion: a direction follows. benefit: a phrase with "for" may follow.
    """

    english: list[str]
    german: list[str]
    prefix: str = ""
    perfect: str = "have"
    subjects: str = "person"
    dative: str = ""
    objects: str = ""
    motion: bool = False
    benefit: bool = False

    def forms(self, slot: str, kind: str) -> dict[str, Words]:
        """Returns the forms that agree with a subject, such as "V:past" for the slot "V"."""
        base, third, past, participle = self.english
        infinitive, third_person, german_participle = self.german
        present = Words(base, infinitive) if kind == "p" else Words(third, third_person)
        return {
            f"{slot}:present": present,
            f"{slot}:prefix": Words("", self.prefix),
            f"{slot}:final": Words("", self.prefix + present.german),
            f"{slot}:base": Words(base, self.prefix + infinitive),
            f"{slot}:past": Words(past, ""),
            f"{slot}:participle": Words(participle, self.prefix + german_participle),
        }


class Present(NamedTuple):
    """A verb that is used in the present only: its forms for "they", "I", and "he" or "she"."""

    english: list[str]
    german: list[str]

    def form(self, kind: str) -> Words:
        """Returns the form that agrees with a subject."""
        person = {"p": 0, "1": 1}.get(kind, 2)
        return Words(self.english[person], self.german[person])


_DATA = read_data("grammar.json")

FRAMES = {name: [each.split() for each in both] for name, both in _DATA["frames"].items()}
"""English and German templates. The slots: S subject; V verb; M the verb's objects and adjuncts; T
time; s and v subject and verb of another clause; A adjective of feeling; C conjunction; R relative
pronoun; and the names of `PRESENTS`. Other tokens are text."""
NOUNS = {name: [Noun(name, **noun) for noun in nouns] for name, nouns in _DATA["nouns"].items()}
"""By category."""
ADJECTIVES = {
    category: [
        Words(*words)
        for categories, table in _DATA["adjectives"].items()
        if category in categories.split()
        for words in table.items()
    ]
    for category in NOUNS
}
"""By category of the nouns that they go with, without endings."""
STATES = [adjective for adjective in ADJECTIVES["person"] if adjective.english in _DATA["states"]]
"""Adjectives that say how someone feels."""
VERBS = [Verb(**verb) for verb in _DATA["verbs"]]
PRESENTS = {name: [Present(**verb) for verb in verbs] for name, verbs in _DATA["presents"].items()}
PRONOUNS = [Phrase(Words(*words), kind, "person") for *words, kind in _DATA["pronouns"]]
DETERMINERS = [Determiner(**determiner) for determiner in _DATA["determiners"]]
PREPOSITIONS: dict[str, list[list[str]]] = _DATA["prepositions"]
"""By the sense of the phrase: the words in both languages, and the case that follows."""
TIMES = {tense: [Words(*pair) for pair in pairs.items()] for tense, pairs in _DATA["times"].items()}
"""By tense."""
CONJUNCTIONS = [Words(*words) for words in _DATA["conjunctions"].items()]
