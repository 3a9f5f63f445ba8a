"""The built-in corpus: size, German, one translation for each sentence, what the splits hold."""

import re
import subprocess
import sys
from collections import Counter
from functools import cache
from itertools import chain
from statistics import mean

import pytest

from transformer_jax.text.corpora import grammar, lexicon

SPLITS = ("train", "validation", "test_seen", "test_new")
DIGEST = "ba2cbed0b92cfaf6a9e658e5874015238519fd5e32b06a0f24f5c6a5a46e84b7"
"""SHA-256 of all pairs: results that were measured on the corpus hold for this one only."""


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@cache
def dictionary() -> dict[str, str]:
    """For each English word the German one that it occurs with most exclusively (Dice)."""
    together: Counter[tuple[str, str]] = Counter()
    alone: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for pair in grammar.load("train")[:10_000]:
        source, target = set(words(pair.source)), set(words(pair.target))
        alone[0].update(source)
        alone[1].update(target)
        together.update((s, t) for s in source for t in target)
    best: dict[str, tuple[float, str]] = {}
    for (source, target), count in together.items():
        dice = count / (alone[0][source] + alone[1][target])
        best[source] = max(best.get(source, (0.0, "")), (dice, target))
    return {source: target for source, (_, target) in best.items()}


def all_pairs() -> list[grammar.Pair]:
    return list(chain.from_iterable(grammar.load(split) for split in SPLITS))


def test_splits_have_the_promised_sizes() -> None:
    assert [len(grammar.load(split)) for split in SPLITS] == [20_000, 500, 400, 100]
    assert grammar.load("test") == grammar.load("test_seen") + grammar.load("test_new")


def test_unknown_split_is_one_line_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"^split 'dev': must be one of train, .*test_new.*$"):
        grammar.load("dev")


def test_caller_may_change_what_load_returns() -> None:
    grammar.sentences("test").clear()
    assert len(grammar.load("test")) == 500


def run(program: str) -> list[str]:
    """The words that a program prints; it imports the package without the tests' type checks."""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    return result.stdout.decode().split()


def test_corpus_is_the_same_everywhere_and_quickly_made() -> None:
    digest, seconds = run(
        "import hashlib, time; from transformer_jax.text.corpora import grammar\n"
        f"pairs = [grammar.load(split) for split in {SPLITS}]\n"
        "text = ''.join(f'{s}\\t{t}\\n' for split in pairs for s, t in split)\n"
        "print(hashlib.sha256(text.encode()).hexdigest(), time.process_time())"
    )
    assert digest == DIGEST
    assert float(seconds) < 2


FEW_WORDS = """
from transformer_jax.text.corpora import lexicon
lexicon.VERBS[:] = lexicon.VERBS[::25]
for table in (lexicon.NOUNS, lexicon.TIMES, lexicon.PREPOSITIONS):
    for words in table.values():
        del words[2:]
for words in (lexicon.DETERMINERS, *lexicon.ADJECTIVES.values()):
    del words[1:]
"""


@pytest.mark.parametrize(
    ("prepare", "least", "most"), [("", 39_000, 40_000), (FEW_WORDS, 0, 35_000)]
)
def test_every_english_sentence_has_one_german_one(prepare: str, least: int, most: int) -> None:
    """With few words thousands of English sentences are drawn again."""
    sources, pairs = run(
        f"{prepare}\n"
        "import itertools; from transformer_jax.text.corpora import grammar\n"
        "pairs = {s.pair for s in itertools.islice(grammar.sample(seed=1), 40_000)}\n"
        "print(len({source for source, _ in pairs}), len(pairs))"
    )
    assert least < int(sources) == int(pairs) <= most


def test_no_sentence_occurs_twice() -> None:
    pairs = all_pairs()
    assert len({pair.source for pair in pairs}) == len(pairs)


def test_at_least_300_lemmas_each_at_least_60_times_in_training() -> None:
    lemmas = grammar.lemmas()
    assert len(set(lemmas)) == len(lemmas) >= 300
    counts = Counter(chain.from_iterable(s.lemmas for s in grammar.sentences("train")))
    assert min(counts[lemma] for lemma in lemmas) >= 60


@pytest.mark.parametrize("side", [0, 1])
def test_sentences_have_at_least_9_words(side: int) -> None:
    for split in SPLITS:
        assert mean(len(pair[side].split()) for pair in grammar.load(split)) >= 9


@pytest.mark.parametrize("side", [0, 1])
def test_words_of_validation_and_test_are_frequent_in_training(side: int) -> None:
    counts = Counter(chain.from_iterable(words(pair[side]) for pair in grammar.load("train")))
    for split in SPLITS[1:]:
        for pair in grammar.load(split):
            assert min(counts[word] for word in words(pair[side])) >= 10, pair


def crosses(pair: grammar.Pair) -> bool:
    """Whether the translations of words that occur once have another order in German."""
    source, target = words(pair.source), words(pair.target)
    links = [
        target.index(dictionary()[word])
        for word in source
        if len(word) > 3 and source.count(word) == target.count(dictionary()[word]) == 1
    ]
    return links != sorted(links)


def test_at_least_30_percent_are_reordered() -> None:
    assert mean(crosses(pair) for pair in grammar.load("train")) >= 0.3


def test_word_by_word_translation_is_hardly_ever_right() -> None:
    def translate(text: str) -> list[str]:
        return [dictionary()[word] for word in words(text)]

    exact = [translate(pair.source) == words(pair.target) for pair in grammar.load("test")]
    assert mean(exact) < 0.05


def test_no_english_form_belongs_to_two_words() -> None:
    words = [
        *({*noun.english} for noun in chain(*lexicon.NOUNS.values())),
        *({*verb.english} for verb in lexicon.VERBS),
        *({*present.english} for present in chain(*lexicon.PRESENTS.values())),
        *({adjective.english} for adjective in {*chain(*lexicon.ADJECTIVES.values())}),
        *({*determiner.english} for determiner in lexicon.DETERMINERS),
        *({pronoun.words.english} for pronoun in lexicon.PRONOUNS),
        *({english} for english, _, _ in chain(*lexicon.PREPOSITIONS.values())),
        *({time.english} for time in {*chain(*lexicon.TIMES.values())}),
        *({conjunction.english} for conjunction in lexicon.CONJUNCTIONS),
    ]
    counts = Counter(form for forms in words for form in forms if form)
    assert [form for form, count in counts.items() if count > 1] == []


def test_english_tells_number_and_tense_apart() -> None:
    for noun in chain(*lexicon.NOUNS.values()):
        assert noun.english[0] != noun.english[1]
    for verb in lexicon.VERBS:
        base, third, past, _ = verb.english
        assert past not in (base, third)


RULES = r"""
    ^I am -> ^Ich bin
    ^I have -> ^Ich (habe|bin)
    ^Does -> ^\w+t .*\?$
    ^Do [^I] -> ^\w+n .*\?$
    ^(Has|Have) -> ^(Hat|Haben|Habe|Ist|Sind|Bin) .*(t|en)\?$
    ^Why (must|can|should) -> ^Warum (muss|müssen|kann|können|sollten?) .*n\?$
    (wants?|would like) to -> (will|wollen|möchten?) .*n\.$
    that (he|she|I) (must|can|should) -> , dass (er|sie|ich) .*n (muss|kann|sollte)\.$
    that (we|they) (must|can|should) -> , dass (wir|sie) .*n (müssen|können|sollten)\.$
    because -> , weil .*(t|en) (hat|haben|habe|ist|sind|bin)\.$
    ^(If|While|Before|Although) -> ^(Wenn|Während|Bevor|Obwohl) .*(t|n), \w+(t|n) .*\.$
    ^(Yesterday|Recently) -> ^(Gestern|Neulich) (hat|haben|habe|ist|sind|bin) .*(t|n)\.$
    ^(Tomorrow|Soon|Later) -> ^(Morgen|Bald|Später) (wird|werden|werde) .*n\.$
    ^(Every|On Sunday) -> ^(Jede[ns]?|Am) \w+ \w+(t|n) .*\.$
    who .* is \w+\.$ -> , (der|die|das) .*t, ist \w+\.$
    who .* are \w+\.$ -> , die .*n, sind \w+\.$
    ^(On Sunday|Every \w+|In \w+) .* (opens|close) -> macht?e?n? .* (auf|zu)\.$
    ^(On Sunday|Every \w+|In \w+) .* packs? -> packe?[nt] .* ein\.$
    that .* (opens|calls|invites|packs) -> , dass .* (aufmacht|anruft|einlädt|einpackt)\.$
    [a-z] has (gone|run|arrived|followed) -> ist .*(gegangen|gelaufen|angekommen|gefolgt)\.$
    [a-z] have (gone|run|arrived|followed) -> sind .*(gegangen|gelaufen|angekommen|gefolgt)\.$
    (help|thank|trust|answer|follow)s? my -> mein(em|er|en)
    \b(give|show|lend)s? our \w+ (the|a|an|two|our) -> unser(em|er|en) \w+ (d|ein|zwei|unser)
    without the (boy|student|neighbor)\b -> ohne den (Jungen|Studenten|Nachbarn)
    with the (dogs|birds|horses)\b -> mit den (Hunden|Vögeln|Pferden)
"""
"""English pattern -> the German one that then matches."""


@pytest.mark.parametrize("rule", RULES.strip().splitlines(), ids=str.strip)
def test_german_follows_its_rules(rule: str) -> None:
    english, german = (re.compile(pattern) for pattern in rule.strip().split(" -> "))
    pairs = [pair for pair in grammar.load("train") if english.search(pair.source)]
    assert len(pairs) >= 5
    assert [pair for pair in pairs if not german.search(pair.target)] == []


DECLENSION = {
    r"^": """
        der -e m, die -e f, das -e n, die -en p, ein -er m, eine -e f, ein -es n, zwei -e p,
        mein -er m, meine -e f, mein -es n, meine -en p, dieser -e m, diese -e f, dieses -e n,
        diese -en p, unser -er m, unsere -e f, unser -es n, unsere -en p""",
    r" (?:ohne|für) ": """
        den -en m, die -e f, das -e n, die -en p, einen -en m, eine -e f, ein -es n, zwei -e p,
        meinen -en m, meine -e f, mein -es n, meine -en p, diesen -en m, diese -e f, dieses -e n,
        diese -en p, unseren -en m, unsere -e f, unser -es n, unsere -en p""",
    r" (?:mit|neben|hinter|vor) ": """
        dem -en m, der -en f, dem -en n, den -en p, einem -en m, einer -en f, einem -en n,
        zwei -en p, meinem -en m, meiner -en f, meinem -en n, meinen -en p, diesem -en m,
        dieser -en f, diesem -en n, diesen -en p, unserem -en m, unserer -en f, unserem -en n,
        unseren -en p""",
    r" ": "im -en m, im -en n, zum -en m, zum -en n, zur -en f, ins -e n",
}
"""What stands before a noun phrase: article, ending of the adjective, gender or plural."""


@pytest.mark.parametrize(("before", "table"), DECLENSION.items())
def test_articles_and_adjectives_agree_in_case_gender_and_number(before: str, table: str) -> None:
    expected = {tuple(row.replace("-", "").split()) for row in table.split(",")}
    articles = "|".join({article for article, *_ in expected})
    phrase = re.compile(rf"{before}({articles}) [a-zäöüß]+?(e[nrs]?) ([A-ZÄÖÜ]\w+)", re.IGNORECASE)
    kinds = unmistakable_kinds()
    phrases = {
        (article.lower(), ending, kinds[noun])
        for pair in grammar.load("train")
        for article, ending, noun in phrase.findall(pair.target)
        if noun in kinds
    }
    assert phrases == expected


def unmistakable_kinds() -> dict[str, str]:
    """Forms of German nouns that are of one gender or plural only."""
    kinds: dict[str, set[str]] = {}
    for noun in chain(*lexicon.NOUNS.values()):
        for case in "nad":
            kinds.setdefault(noun.inflect(case, plural=False), set()).add(noun.gender)
            kinds.setdefault(noun.inflect(case, plural=True), set()).add("p")
    return {form: min(some) for form, some in kinds.items() if len(some) == 1}


def test_sentences_are_ordinary_text() -> None:
    for pair in all_pairs():
        for text in pair:
            assert re.fullmatch(r"[A-ZÄÖÜ][A-Za-zÄÖÜäöüß]*(,? [A-Za-zÄÖÜäöüß]+)*[.?]", text), text
        assert not re.search(r"\b(a [aeiou]|an [^aeiou])", pair.source.lower())
        assert not re.search(r"[^,] (dass|weil)\b", pair.target)


def test_german_nouns_are_capitalised_and_nothing_else_is() -> None:
    nouns = {
        noun.inflect(case, plural)
        for noun in chain(*lexicon.NOUNS.values())
        for case in "nad"
        for plural in (False, True)
    }
    assert all(noun[0].isupper() for noun in nouns)
    times = {word for time in chain(*lexicon.TIMES.values()) for word in time.german.split()}
    for pair in all_pairs():
        inside = pair.target.split(" ", 1)[1]
        assert set(re.findall(r"\b[A-ZÄÖÜ]\w*", inside)) <= nouns | times, pair


def test_new_combinations_are_unknown_to_training_and_validation() -> None:
    seen = combinations("train") | combinations("validation")
    for sentence in grammar.sentences("test_new"):
        assert not {(lemma, sentence.frame) for lemma in sentence.lemmas} <= seen
    assert combinations("validation") | combinations("test_seen") <= combinations("train")


def test_lemmas_and_frames_of_new_combinations_are_known_apart() -> None:
    trained = combinations("train")
    new = combinations("test_new") - trained
    assert {lemma for lemma, _ in new} <= {lemma for lemma, _ in trained}
    assert {frame for _, frame in new} <= {frame for _, frame in trained} == {*lexicon.FRAMES}
    assert len(new) >= 20


def combinations(split: str) -> set[tuple[str, str]]:
    return {(lemma, s.frame) for s in grammar.sentences(split) for lemma in s.lemmas}
