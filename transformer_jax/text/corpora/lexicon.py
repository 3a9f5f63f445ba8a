"""The English and German words of the built-in corpus, and their forms.

Each English word has one translation and no English form belongs to two words, so that sentences
are unambiguous. For that reason there is no "you", "it" or "her", no noun with the same singular
and plural, such as "sheep", and no verb with the same present and past, such as "read".
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

_CASES = "nad"  # nominative, accusative, dative
_KINDS = "mfnp"  # what articles and adjectives agree with: three genders, or any plural


class Words(NamedTuple):
    """Words of the same meaning in both languages; empty if a language has none."""

    english: str
    german: str


class Present(NamedTuple):
    """The present of a verb: its forms for "I", the third person singular, and the plural."""

    lemma: str
    forms: tuple[Words, ...]


class Preposition(NamedTuple):
    """A preposition, and the case that it governs in the sense used here."""

    words: Words
    case: str


class Pronoun(NamedTuple):
    """A personal pronoun in the nominative. `kind` is m, f, n, p (plural) or 1 ("I")."""

    words: Words
    kind: str


class Determiner(NamedTuple):
    """A determiner.

    `english` is the singular and the plural. `german`, and the `endings` of an adjective after it,
    are by case and kind, such as "dp" for the dative plural.
    """

    english: tuple[str, str]
    german: dict[str, str]
    endings: dict[str, str]


class Noun(NamedTuple):
    """A noun. `english` and `german` are singular and plural; `weak` is explained at `_NOUNS`."""

    lemma: str
    category: str
    english: tuple[str, str]
    german: tuple[str, str]
    gender: str
    weak: bool

    def inflect(self, case: str, plural: bool) -> str:
        """Returns the German form."""
        if plural and case == "d" and self.german[1][-1] not in "ns":
            return self.german[1] + "n"
        return self.german[plural or (self.weak and case != "n")]


class Adjective(NamedTuple):
    """An adjective. German endings are added to `stem`; `words` have no ending."""

    lemma: str
    words: Words
    stem: str


class Verb(NamedTuple):
    """A verb and its complements.

    `forms` are those of the third person singular and of the plural, by name. "present" and
    "prefix" are separate in a German main clause and joined as "final" at the end of a subordinate
    one. `perfect` is the auxiliary of the German perfect, "have" or "be". Subjects, objects and
    datives, which come before objects, are categories of nouns. `motion`: a direction follows.
    `benefit`: a phrase with "for" may follow.
    """

    lemma: str
    forms: tuple[dict[str, Words], dict[str, Words]]
    perfect: str
    subjects: tuple[str, ...]
    objects: tuple[str, ...]
    dative: tuple[str, ...]
    motion: bool
    benefit: bool


_NOUNS = {
    "person": """
        man/men Mann m Männer, woman/women Frau f Frauen, child/children Kind n Kinder,
        boy Junge w Jungen, girl Mädchen n Mädchen, teacher Lehrer m Lehrer,
        doctor Arzt m Ärzte, student Student w Studenten, father Vater m Väter,
        mother Mutter f Mütter, brother Bruder m Brüder, sister Schwester f Schwestern,
        son Sohn m Söhne, daughter Tochter f Töchter, uncle Onkel m Onkel, aunt Tante f Tanten,
        grandmother Großmutter f Großmütter, grandfather Großvater m Großväter,
        friend Freund m Freunde, neighbor Nachbar w Nachbarn, farmer Bauer w Bauern,
        baker Bäcker m Bäcker, painter Maler m Maler, singer Sänger m Sänger,
        dancer Tänzer m Tänzer, waitress Kellnerin f Kellnerinnen, gardener Gärtner m Gärtner,
        nurse Krankenschwester f Krankenschwestern, king König m Könige,
        queen Königin f Königinnen, princess Prinzessin f Prinzessinnen, thief/thieves Dieb m Diebe,
        customer Kunde w Kunden, guest Gast m Gäste, lawyer Anwalt m Anwälte,
        actress Schauspielerin f Schauspielerinnen, niece Nichte f Nichten,
        witch Hexe f Hexen, hunter Jäger m Jäger, engineer Ingenieur m Ingenieure,
        judge Richter m Richter, soldier Soldat w Soldaten, nun Nonne f Nonnen,
        musician Musiker m Musiker, pilot Pilot w Piloten, mayor Bürgermeister m Bürgermeister""",
    "animal": """
        dog Hund m Hunde, cat Katze f Katzen, horse Pferd n Pferde, cow Kuh f Kühe,
        pig Schwein n Schweine, bird Vogel m Vögel, goat Ziege f Ziegen, duck Ente f Enten,
        rabbit Kaninchen n Kaninchen, wolf/wolves Wolf m Wölfe, fox Fuchs m Füchse,
        chicken Huhn n Hühner, donkey Esel m Esel, camel Kamel n Kamele, mouse/mice Maus f Mäuse""",
    "thing": """
        bottle Flasche f Flaschen, cup Tasse f Tassen, plate Teller m Teller,
        knife/knives Messer n Messer, spoon Löffel m Löffel, fork Gabel f Gabeln,
        bag Tasche f Taschen, box Kiste f Kisten, key Schlüssel m Schlüssel, clock Uhr f Uhren,
        map Karte f Karten, ball Ball m Bälle, basket Korb m Körbe, blanket Decke f Decken,
        umbrella Regenschirm m Regenschirme, suitcase Koffer m Koffer, gift Geschenk n Geschenke,
        flower Blume f Blumen, pencil Bleistift m Bleistifte, mirror Spiegel m Spiegel,
        candle Kerze f Kerzen, coin Münze f Münzen, doll Puppe f Puppen, pot Topf m Töpfe,
        bucket Eimer m Eimer, rope Seil n Seile, pillow Kissen n Kissen, picture Bild n Bilder,
        ring Ring m Ringe""",
    "text": """
        book Buch n Bücher, letter Brief m Briefe, newspaper Zeitung f Zeitungen,
        poem Gedicht n Gedichte, novel Roman m Romane, report Bericht m Berichte,
        song Lied n Lieder""",
    "clothes": """
        coat Mantel m Mäntel, shirt Hemd n Hemden, hat Hut m Hüte, shoe Schuh m Schuhe,
        dress Kleid n Kleider, skirt Rock m Röcke, jacket Jacke f Jacken,
        glove Handschuh m Handschuhe""",
    "device": """
        lamp Lampe f Lampen, radio/radios Radio n Radios, computer Computer m Computer,
        television Fernseher m Fernseher, machine Maschine f Maschinen""",
    "vehicle": """
        car Auto n Autos, bicycle Fahrrad n Fahrräder, boat Boot n Boote,
        truck Lastwagen m Lastwagen""",
    "furniture": """
        table Tisch m Tische, chair Stuhl m Stühle, bed Bett n Betten""",
    "door": """
        door Tür f Türen, window Fenster n Fenster, gate Tor n Tore, cupboard Schrank m Schränke,
        drawer Schublade f Schubladen""",
    "food": """
        apple Apfel m Äpfel, egg Ei n Eier, cake Kuchen m Kuchen,
        potato Kartoffel f Kartoffeln, tomato Tomate f Tomaten,
        carrot Karotte f Karotten, pear Birne f Birnen, sausage Würstchen n Würstchen,
        roll Brötchen n Brötchen, banana Banane f Bananen, cookie Keks m Kekse,
        steak Steak n Steaks""",
    "place": """
        garden Garten m Gärten, park Park m Parks, kitchen Küche f Küchen, church Kirche f Kirchen,
        house Haus n Häuser, school Schule f Schulen, hotel Hotel n Hotels, museum Museum n Museen,
        hospital Krankenhaus n Krankenhäuser, restaurant Restaurant n Restaurants,
        factory Fabrik f Fabriken, library Bibliothek f Bibliotheken, castle Schloss n Schlösser,
        theater Theater n Theater, office Büro n Büros, shop Laden m Läden,
        garage Garage f Garagen, barn Scheune f Scheunen, tower Turm m Türme, cinema Kino n Kinos,
        bakery Bäckerei f Bäckereien, forest Wald m Wälder, village Dorf n Dörfer,
        city Stadt f Städte, cellar Keller m Keller, cave Höhle f Höhlen,
        station Bahnhof m Bahnhöfe, tent Zelt n Zelte, bathroom Badezimmer n Badezimmer,
        bedroom Schlafzimmer n Schlafzimmer, pharmacy Apotheke f Apotheken,
        palace Palast m Paläste, hut Hütte f Hütten, ship Schiff n Schiffe, temple Tempel m Tempel,
        stadium Stadion n Stadien""",
}
"""By category: English[/plural] German gender plural. The gender w is a weak masculine, which has
the form of the plural in all cases but the nominative (der Junge, den Jungen)."""

_ADJECTIVES = {
    "all": "old alt, small klein, big groß, beautiful schön, ugly hässlich, strange seltsam",
    "person animal": """
        young jung, clever klug, lazy faul, brave mutig, strong stark, tired müde,
        hungry hungrig, thirsty durstig, sick krank, sad traurig, angry wütend, happy glücklich""",
    "person": "rich reich, poor arm, famous berühmt, polite höflich, friendly freundlich",
    "thing clothes device vehicle furniture door": """
        red rot, blue blau, green grün, yellow gelb, black schwarz, heavy schwer,
        dirty schmutzig""",
    "thing text clothes device vehicle furniture door": "new neu, cheap billig, valuable wertvoll",
    "device vehicle furniture place": "modern modern",
    "person animal place": "quiet ruhig",
    "thing food place": "huge riesig",
    "food place": "cold kalt, warm warm",
}
"""By categories of nouns: English German."""

_STATES = ["tired", "hungry", "thirsty", "sick", "sad", "angry", "happy"]

_VERBS = """
    buy bought bought|kaufen kauft gekauft|for thing text clothes food vehicle furniture
    sell sold sold|verkaufen verkauft verkauft|thing text clothes food vehicle furniture
    find found found|finden findet gefunden|thing text clothes animal person|animal
    lose lost lost|verlieren verliert verloren|thing text clothes
    carry|tragen trägt getragen|thing device furniture
    need|brauchen braucht gebraucht|thing clothes device vehicle
    use|benutzen benutzt benutzt|thing device vehicle
    repair|reparieren repariert repariert|for device vehicle furniture door
    forget forgot forgotten|vergessen vergisst vergessen|thing text clothes
    describe|beschreiben beschreibt beschrieben|person animal thing text place furniture
    draw drew drawn|zeichnen zeichnet gezeichnet|for person animal thing place
    steal stole stolen|stehlen stiehlt gestohlen|thing clothes food vehicle animal
    order|bestellen bestellt bestellt|for food text clothes furniture
    clean|putzen putzt geputzt|door furniture device vehicle clothes
    wash|waschen wäscht gewaschen|clothes vehicle animal
    count|zählen zählt gezählt|thing animal food
    look for|suchen sucht gesucht|thing text clothes animal person
    push|schieben schiebt geschoben|vehicle furniture
    build built built|bauen baut gebaut|for vehicle furniture device place
    check|prüfen prüft geprüft|device vehicle door text
    open|machen macht gemacht auf|for door
    close|machen macht gemacht zu|for door
    turn on|schalten schaltet geschaltet ein|device
    turn off|schalten schaltet geschaltet aus|device
    wear wore worn|tragen trägt getragen|clothes
    try on|probieren probiert probiert an|clothes
    take took taken along|nehmen nimmt genommen mit|thing text clothes animal food
    throw threw thrown away|werfen wirft geworfen weg|thing text clothes food
    bring brought brought along|bringen bringt gebracht mit|thing text food person
    borrow|leihen leiht geliehen aus|for thing text vehicle
    choose chose chosen|wählen wählt gewählt aus|for thing text clothes food furniture
    pack|packen packt gepackt ein|for thing text clothes food
    unpack|packen packt gepackt aus|thing text clothes food
    write wrote written|schreiben schreibt geschrieben|for text
    translate|übersetzen übersetzt übersetzt|for text
    love|lieben liebt geliebt|person animal
    see saw seen|sehen sieht gesehen|person animal vehicle place furniture|animal
    watch|beobachten beobachtet beobachtet|person animal|animal
    visit|besuchen besucht besucht|person place
    greet|begrüßen begrüßt begrüßt|person
    meet met met|treffen trifft getroffen|person
    invite|laden lädt geladen ein|person
    call|rufen ruft gerufen an|person
    pick up|holen holt geholt ab|person
    wake woke woken|wecken weckt geweckt|person animal
    hug hugged hugged|umarmen umarmt umarmt|person animal
    ask|fragen fragt gefragt|person
    understand understood understood|verstehen versteht verstanden|person text
    hear heard heard|hören hört gehört|person animal
    praise|loben lobt gelobt|person
    admire|bewundern bewundert bewundert|person place
    warn|warnen warnt gewarnt|person
    surprise|überraschen überrascht überrascht|person
    feed fed fed|füttern füttert gefüttert|animal
    catch caught caught|fangen fängt gefangen|animal
    eat ate eaten|essen isst gegessen|food|animal
    taste|probieren probiert probiert|food
    share|teilen teilt geteilt|food
    cook|kochen kocht gekocht|for food
    search|durchsuchen durchsucht durchsucht|place
    tidy up|räumen räumt geräumt auf|place
    help|helfen hilft geholfen|to:person,animal
    thank|danken dankt gedankt|to:person,animal
    answer|antworten antwortet geantwortet|to:person
    trust|vertrauen vertraut vertraut|to:person,animal
    follow|folgen folgt ist gefolgt|to:person,animal|animal
    forgive forgave forgiven|verzeihen verzeiht verziehen|to:person
    listen to|hören hört gehört zu|to:person,animal
    agree with|stimmen stimmt gestimmt zu|to:person
    give gave given|geben gibt gegeben|to:person thing text clothes food animal
    show showed shown|zeigen zeigt gezeigt|to:person thing text clothes vehicle
    send sent sent|schicken schickt geschickt|to:person thing text clothes
    lend lent lent|leihen leiht geliehen|to:person thing text clothes vehicle
    offer|bieten bietet geboten an|to:person thing text food
    sleep slept slept|schlafen schläft geschlafen||animal
    sing sang sung|singen singt gesungen|
    dance|tanzen tanzt getanzt|
    laugh|lachen lacht gelacht|
    work|arbeiten arbeitet gearbeitet|
    wait|warten wartet gewartet||animal
    play|spielen spielt gespielt||animal
    cry|weinen weint geweint|
    smile|lächeln lächelt gelächelt|
    arrive|kommen kommt ist gekommen an||animal
    fall fell fallen asleep|schlafen schläft ist geschlafen ein||animal
    disappear|verschwinden verschwindet ist verschwunden||animal
    go went gone|gehen geht ist gegangen|where|animal
    run ran run|laufen läuft ist gelaufen|where|animal
    drive drove driven|fahren fährt ist gefahren|where
    hurry|eilen eilt ist geeilt|where|animal
    ride rode ridden|reiten reitet ist geritten|where
    return|kehren kehrt ist gekehrt zurück|where|animal
"""
"""English base [past participle] [particle] | German infinitive third-person ["ist"] participle
[separable prefix] | complements | "animal" if animals can be its subject. "ist" marks a perfect
with sein. Complements: "to:" and the categories of a noun in the dative; the categories of an
object in the accusative; "for" if a phrase with "for" may follow; "where" if a direction follows.
"""

_TIMES = {
    "present": """
        every day|jeden Tag, every week|jede Woche, every year|jedes Jahr,
        every morning|jeden Morgen, every evening|jeden Abend, in summer|im Sommer,
        in winter|im Winter, on Sunday|am Sonntag, today|heute, now|jetzt""",
    "future": """
        tomorrow|morgen, soon|bald, later|später, next month|nächsten Monat, tonight|heute Abend,
        on Monday|am Montag, on Friday|am Freitag, today|heute, now|jetzt""",
    "past": """
        yesterday|gestern, recently|neulich, last night|letzte Nacht, last autumn|letzten Herbst,
        last spring|letzten Frühling, on Tuesday|am Dienstag, on Thursday|am Donnerstag""",
}

_PRONOUNS = "I ich 1, he er m, she sie f, we wir p, they sie p"
"""English German kind; kind 1 is the first person singular."""

_DETERMINERS = """
    the the|d|er ie as ie, en ie as ie, em er em en|weak
    a two||ein eine ein zwei, einen eine ein zwei, einem einer einem zwei|strong
    this these|dies|er e es e, en e es e, em er em en|weak
    my my|mein|- e - e, en e - e, em er em en|mixed
    our our|unser|- e - e, en e - e, em er em en|mixed
"""
"""English singular plural | German stem | its endings by case and kind | declension of an adjective
that follows."""

_DECLENSIONS = {
    "weak": "e e e en, en e e en, en en en en",
    "mixed": "er e es en, en e es en, en en en en",
    "strong": "er e es e, en e es e, en en en en",
}
"""Endings of adjectives by case and kind. "strong" is mixed inflection after "ein" and strong
inflection after "zwei"."""

_PRESENTS = {
    "do": "do does do|",
    "have": "have has have|habe hat haben",
    "be": "am is are|bin ist sind",
    "will": "will will will|werde wird werden",
    "modal": """
        must must must|muss muss müssen, can can can|kann kann können,
        should should should|sollte sollte sollten""",
    "wish": """
        want-to wants-to want-to|will will wollen,
        would-like-to would-like-to would-like-to|möchte möchte möchten""",
    "opinion": """
        know knows know|weiß weiß wissen, believe believes believe|glaube glaubt glauben,
        say says say|sage sagt sagen, hope hopes hope|hoffe hofft hoffen,
        claim claims claim|behaupte behauptet behaupten,
        notice notices notice|bemerke bemerkt bemerken,
        suspect suspects suspect|vermute vermutet vermuten,
        dream dreams dream|träume träumt träumen""",
}
"""Forms for "I", for "he" or "she", and for plurals; a hyphen stands for a space."""

_PREPOSITIONS = {
    "place": "in|in|d, in front of|vor|d, behind|hinter|d, next to|neben|d",
    "direction": "into|in|a, to|zu|d",
    "company": "with|mit|d, without|ohne|a",
    "benefit": "for|für|a",
}
"""English | German | case."""

_CONJUNCTIONS = "if|wenn, while|während, before|bevor, although|obwohl"


def _entries(table: str) -> list[str]:
    return [entry.strip() for entry in table.split(",")]


def _words(entry: str) -> Words:
    return Words(*entry.split("|"))


def _by_case_and_kind(table: str) -> dict[str, str]:
    keys = [case + kind for case in _CASES for kind in _KINDS]
    return dict(zip(keys, table.replace(",", "").split(), strict=True))


def _suffixed(word: str, suffix: str) -> str:
    """Returns a regular English plural or third person ("s"), or past ("d"), such as "carried"."""
    if word[-1] == "y" and word[-2] not in "aeiou":
        return f"{word[:-1]}ie{suffix}"
    if word[-1] == "e" or (suffix == "s" and not word.endswith(("s", "x", "ch", "sh", "o"))):
        return word + suffix
    return f"{word}e{suffix}"


def _noun(category: str, entry: str) -> Noun:
    english, german, gender, plural = entry.split()
    one, _, many = english.partition("/")
    both = (one, many or _suffixed(one, "s"))
    return Noun(one, category, both, (german, plural), gender.replace("w", "m"), gender == "w")


def _adjective(entry: str) -> Adjective:
    english, german = entry.split()
    return Adjective(english, Words(english, german), german.removesuffix("e"))


def _verb(line: str) -> Verb:
    english, german, complements, animal = (part.split() for part in f"{line}|".split("|")[:4])
    dative = "".join(word for word in complements if word.startswith("to:"))
    objects = (word for word in complements if word not in (dative, "where", "for"))
    *verb, particle = english if len(english) % 2 == 0 else [*english, ""]
    base = verb[0]
    past, perfect = verb[1:] or [_suffixed(base, "d")] * 2
    infinitive, third, participle, prefix = [*(word for word in german if word != "ist"), ""][:4]

    def forms(english_present: str, german_present: str) -> dict[str, Words]:
        return {
            "present": Words(f"{english_present} {particle}".strip(), german_present),
            "prefix": Words("", prefix),
            "final": Words("", prefix + german_present),
            "base": Words(f"{base} {particle}".strip(), prefix + infinitive),
            "past": Words(f"{past} {particle}".strip(), ""),
            "participle": Words(f"{perfect} {particle}".strip(), prefix + participle),
        }

    return Verb(
        lemma=f"{base} {particle}".strip(),
        forms=(forms(_suffixed(base, "s"), third), forms(base, infinitive)),
        perfect="be" if "ist" in german else "have",
        subjects=("person", *animal),
        objects=tuple(objects),
        dative=tuple(dative.removeprefix("to:").split(",")) if dative else (),
        motion="where" in complements,
        benefit="for" in complements,
    )


def _present(entry: str) -> Present:
    english, german = (side.split() for side in entry.split("|"))
    english = [form.replace("-", " ") for form in english]
    forms = tuple(Words(*form) for form in zip_longest(english, german, fillvalue=""))
    return Present(english[-1], forms)


def _preposition(entry: str) -> Preposition:
    english, german, case = entry.split("|")
    return Preposition(Words(english, german), case)


def _pronoun(entry: str) -> Pronoun:
    english, german, kind = entry.split()
    return Pronoun(Words(english, german), kind)


def _determiner(line: str) -> Determiner:
    english, stem, endings, declension = line.strip().split("|")
    one, many = english.split()
    german = {key: stem + ending.strip("-") for key, ending in _by_case_and_kind(endings).items()}
    return Determiner((one, many), german, _by_case_and_kind(_DECLENSIONS[declension]))


NOUNS = {name: [_noun(name, entry) for entry in _entries(t)] for name, t in _NOUNS.items()}
"""By category."""
ADJECTIVES = {
    name: [
        _adjective(entry)
        for categories, table in _ADJECTIVES.items()
        if categories == "all" or name in categories.split()
        for entry in _entries(table)
    ]
    for name in NOUNS
}
"""By category of the nouns that they go with."""
STATES = [adjective for adjective in ADJECTIVES["person"] if adjective.lemma in _STATES]
"""Adjectives that say how someone feels."""
VERBS = [_verb(line) for line in _VERBS.strip().splitlines()]
PRESENTS = {name: [_present(entry) for entry in _entries(t)] for name, t in _PRESENTS.items()}
"""Verbs that are used in the present only."""
PRONOUNS = [_pronoun(entry) for entry in _entries(_PRONOUNS)]
DETERMINERS = [_determiner(line) for line in _DETERMINERS.strip().splitlines()]
PREPOSITIONS = {
    name: [_preposition(entry) for entry in _entries(t)] for name, t in _PREPOSITIONS.items()
}
"""By the sense of the phrase."""
TIMES = {name: [_words(entry) for entry in _entries(t)] for name, t in _TIMES.items()}
"""By tense."""
CONJUNCTIONS = [_words(entry) for entry in _entries(_CONJUNCTIONS)]
