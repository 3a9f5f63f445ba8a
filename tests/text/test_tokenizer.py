"""Round trips on any Unicode text, ids, sampling, training and bad input."""

from __future__ import annotations

import itertools
import random
import re
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import sentencepiece
from common import normalized
from corpus_files import sentencepiece_model
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.config import TokenizerConfig
from transformer_jax.special_ids import BOS, EOS, PAD, UNK
from transformer_jax.text import tokenizer
from transformer_jax.text.tokenizer import Tokenizer, Tokenizers

Kind = Literal["bpe", "unigram"]
KINDS: list[Kind] = ["bpe", "unigram"]
SYLLABLES = ["ba", "dür", "en", "fa", "gel", "Hu", "ko", "lor", "mi", "nd", "ö", "ste", "Zu"]
CONTROLS = [*map(chr, (*range(9), *range(0xE, 0x20), *range(0x7F, 0x85), *range(0x86, 0xA0)))]
DIRECTIONS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
INVISIBLE = [
    *CONTROLS,
    *DIRECTIONS,
    *"\xad\u034f\u17b4\u200b\u200c\u200d\u2060\u2061\u2064\u206f\ufeff",
    *"\ufe00\ufe0f\U000e0100\U000e01ef\U000e0001\U000e0067\ufff9\U0001bca0\U0001d173",
]
BLANK = "\t\n\v\f\r\x85\xa0\u1680\u2002\u2007\u2009\u202f\u205f\u2800\u3000\u3164\u2028\u2029"
KEPT = [
    "می‌خواهم",
    "क्\u200dष र\u200d्य",
    "👩\u200d👩\u200d👧 🏳\u200d🌈",
    "ᠨᠠ\u180b\u180eᠠ",
    "\u115f\u1161 \u1100\u1160",
    "\u0600١ \u06dd",
]
RESERVED = ["<pad>", "<s>", "</s>", "<unk>", "<0x0A>", "<ph>", "▁", "⁇", "\ufffd"]
SPACES = ["\0", "\t", "\n", "\r", "\x1f", "\x85", "\xa0", "\u2028", "\u2029", "\u3000", "\u200b"]
PARTS = st.sampled_from(
    [*RESERVED, *SPACES, *INVISIBLE[-20:], *KEPT, "e\u0301", "ﬁ", "İ", "Hund", "mist", " "]
)


def text(count: int, seed: int) -> list[str]:
    """Sentences of words made of a few syllables; the first words are frequent."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(200)]
    rank = [1 / (i + 1) for i in range(len(words))]
    return [" ".join(rng.choices(words, rank, k=rng.randint(3, 9))) for _ in range(count)]


@cache
def pairs() -> list[tuple[str, str]]:
    return list(zip(text(400, 1), text(400, 2), strict=True))


@cache
def trained(kind: Kind = "bpe", symbols: tuple[str, ...] = ("<ph>", "a b")) -> Tokenizer:
    config = TokenizerConfig(kind=kind, vocabulary=400, symbols=symbols)
    return tokenizer.train(pairs(), config).source


@cache
def made_elsewhere(kind: str = "bpe") -> bytes:
    """A model with SentencePiece's own ids: 0 unknown, 1 begin, 2 end, no padding, no bytes."""
    lines = itertools.chain.from_iterable(pairs())
    return sentencepiece_model(lines, model_type=kind, vocab_size=100)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None, database=None)
@given(text=st.lists(PARTS | st.text(max_size=4), max_size=8).map("".join))
def test_round_trip_of_any_text(kind: Kind, text: str) -> None:
    coder = trained(kind)
    for ids in (coder.encode(text), coder.sample(coder.encode(text), 0.5, 1)):
        assert coder.decode(ids) == normalized(coder, text)
        assert not {PAD, BOS, EOS, UNK} & {*ids}


def test_decoded_text_is_one_stripped_line_of_the_models_own_normalization() -> None:
    def decoded(text: str) -> str:
        return trained().decode(trained().encode(text))

    assert decoded("\u2028 e\u0301\xa0\t x\u2029y\x85z▁\x07 ") == "é x y z"
    for typography in ("m² …“ö” ½ ™ – ’", "ｆｕｌｌ"):
        assert decoded(typography) == typography


@pytest.mark.parametrize("kind", KINDS)
def test_invisible_characters_in_words_make_no_difference(kind: Kind) -> None:
    coder = trained(kind)
    for word in ("Hundmist", "Zügel", "Straße, müde.", "Ѐлка", "λόγος", "e\u0301t"):
        ids = coder.encode(word)
        for character in INVISIBLE:
            for place in range(len(word) - 1):
                inside = word[:place] + character + word[place:]
                if word[place] not in "\u0301 ,.":
                    assert coder.encode(inside) == ids, (inside, place)


def test_blanks_divide_words_and_what_has_a_meaning_stays() -> None:
    coder = trained()
    for blank in BLANK:
        assert coder.encode(f"Hund{blank}mist") == coder.encode("Hund mist")
        assert coder.encode(f"{blank}Hund \xad{blank}") == coder.encode("Hund")
    for text in KEPT:
        assert coder.decode(coder.encode(text)) == text


def test_every_control_and_format_character_is_decided() -> None:
    characters = [chr(i) for i in range(0x110000) if unicodedata.category(chr(i)) in ("Cc", "Cf")]
    kept = {c for c in characters if c in trained().normalize(f"1{c}1")}
    visible = r"[\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd]"
    assert all(re.match(rf"{visible}|[\u180e\u200c\u200d\U00013430-\U0001345f]", c) for c in kept)


def test_invisible_characters_do_not_change_what_is_learned() -> None:
    rng = random.Random(0)

    def hide(line: str) -> str:
        removed = [c for c in INVISIBLE if c not in "\u200c\u200d"]  # these stay before a space
        return "".join(c + rng.choice(removed) * (rng.random() < 0.1) for c in line)

    config = TokenizerConfig(vocabulary=400, symbols=("<ph>", "a b"))
    hidden = [(hide(source), hide(target)) for source, target in pairs()]
    assert tokenizer.train(hidden, config).source.model == trained().model


def test_models_made_elsewhere_keep_their_own_normalization() -> None:
    coder = Tokenizer(made_elsewhere())
    inner = sentencepiece.SentencePieceProcessor(model_proto=made_elsewhere())
    for character in INVISIBLE[1:]:
        line = f"Hu{character}mist"
        assert coder.pieces(coder.encode(line)) == [*map(inner.id_to_piece, inner.encode(line))]


def test_decode_makes_one_line_of_any_ids() -> None:
    controls = [4 + 2 + byte for byte in b"a\n\xe2\x80\xa8\xe2\x80\xa9\xc2\x85\xffb"]
    assert trained().pieces(controls[:2]) == ["<0x61>", "<0x0A>"]
    assert trained().decode([BOS, *controls, PAD, EOS]) == "a    \ufffdb"


@pytest.mark.parametrize("text", ["\ud800", "ab\udfff"])
def test_lone_surrogates_are_refused(text: str) -> None:
    coder = trained()
    for call in (
        coder.encode,
        lambda text: coder.encode_all(["fine", text]),
        lambda text: tokenizer.train([(text, text)], TokenizerConfig()),
    ):
        with pytest.raises(ValueError, match=rf"lone surrogate U\+D\w+ at character {len(text)};"):
            call(text)


def test_trained_models_have_this_projects_ids() -> None:
    coder = trained()
    inner = sentencepiece.SentencePieceProcessor(model_proto=coder.model)
    assert coder.size == inner.get_piece_size() == 400
    assert coder.pieces(range(6)) == ["<pad>", "<s>", "</s>", "<unk>", "<ph>", "a▁b"]
    sentence = pairs()[0][0]
    assert coder.encode(sentence) == inner.encode(sentence)
    assert len(coder.encode(sentence)) < len(sentence) / 2


def test_symbols_are_one_piece_wherever_they_stand() -> None:
    for kind in KINDS:
        ids = trained(kind).encode("Hu<ph>nda  b")
        assert {"<ph>", "a▁b"} < {*trained(kind).pieces(ids)}
        for i in range(20):
            assert {"<ph>", "a▁b"} < {*trained(kind).pieces(trained(kind).sample(ids, 0.9, i))}


def test_models_made_elsewhere_get_this_projects_ids() -> None:
    coder = Tokenizer(made_elsewhere())
    inner = sentencepiece.SentencePieceProcessor(model_proto=made_elsewhere())
    assert coder.size == inner.get_piece_size() + 1  # padding
    assert coder.pieces(range(4)) == ["<pad>", "<s>", "</s>", "<unk>"]
    assert coder.pieces(range(4, coder.size)) == [inner.id_to_piece(i) for i in range(3, 100)]
    line = "Hu 犬 mist"
    ids = coder.encode(line)
    wanted = inner.encode(line, out_type=str)
    assert [piece.replace("<unk>", "犬") for piece in coder.pieces(ids)] == wanted
    assert ids.count(UNK) == 1
    assert coder.decode([BOS, *ids, EOS, PAD]).split() == ["Hu", "⁇", "mist"]


def test_encode_all_is_encode_of_each() -> None:
    lines = [*text(50, 3), ""]
    for coder in (trained(), Tokenizer(made_elsewhere())):
        ids, lengths = coder.encode_all(lines, threads=3)
        wanted = [coder.encode(line) for line in lines]
        assert lengths.tolist() == [len(row) for row in wanted]
        assert ids.tolist() == [*itertools.chain.from_iterable(wanted)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_a_function_of_its_arguments(kind: Kind) -> None:
    coder = trained(kind)
    lines = [coder.encode(line) for line in text(100, 3)]

    def sample(i: int) -> list[int]:
        return coder.sample(lines[i], 0.1, 7, 0, i)

    wanted = [sample(i) for i in range(100)]
    order = random.Random(0).sample(range(100), 100)
    with ThreadPoolExecutor(4) as pool:
        samples = dict(zip(order, pool.map(sample, order), strict=True))
    assert [samples[i] for i in range(100)] == wanted
    for other in ((0.1, 8, 0, 0), (0.1, 7, 1, 0), (0.1, 7, 0, 1), (0.2, 7, 0, 0)):
        differ = sum(coder.sample(x, *other) != coder.sample(x, 0.1, 7, 0, 0) for x in lines)
        assert differ > 30


def test_a_sample_has_the_ids_of_this_project() -> None:
    coder = Tokenizer(made_elsewhere())
    ids = coder.encode("Hu mist dür")
    samples = [coder.sample(ids, 0.5, i) for i in range(20)]
    assert any(sample != ids for sample in samples)
    assert {coder.decode(sample) for sample in samples} == {"Hu mist dür"}
    unknown = coder.encode("Hu 犬 mist")
    assert all(coder.sample(unknown, 0.5, i) == unknown for i in range(20))


def test_word_models_cannot_sample() -> None:
    coder = Tokenizer(made_elsewhere("word"))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"tokenizer\.sampling=0\.1: must be 0 for a model"):
            coder.sample([], 0.1)


def test_every_merge_cannot_be_dropped() -> None:
    said = r"tokenizer\.sampling=1\.0: must be below 1 for a BPE model"
    with pytest.raises(ValueError, match=said):
        trained("bpe").sample(trained("bpe").encode("Hund"), 1.0)
    ids = trained("unigram").encode("Hund")
    assert trained("unigram").decode(trained("unigram").sample(ids, 1.0)) == "Hund"


def test_a_joint_vocabulary_is_one_object_and_separate_ones_know_their_side() -> None:
    joint = tokenizer.train(pairs(), TokenizerConfig(vocabulary=300))
    assert joint.source is joint.target
    sides = [("eins eins eins", "two two two")] * 5
    apart = tokenizer.train(sides, TokenizerConfig(vocabulary=265, joint=False))
    assert apart.source.digest != apart.target.digest
    assert "two" in "".join(apart.target.pieces(range(apart.target.size)))
    assert "two" not in "".join(apart.source.pieces(range(apart.source.size)))


def test_training_reads_a_bounded_even_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    coder, stream = trained(), [(f"s{i}", f"t{i}") for i in range(1000)]
    monkeypatch.setattr(tokenizer, "TRAINING_LINES", 200)

    def read(seed: int, joint: bool = True) -> list[str]:
        lines: list[str] = []
        monkeypatch.setattr(tokenizer, "_train", lambda read, _: lines.extend(read) or coder)
        tokenizer.train(iter(stream), TokenizerConfig(joint=joint), seed=seed)
        return lines

    first = read(1)
    assert len({*first}) == 200
    assert all(f"t{line[1:]}" in first for line in first)
    assert 350 < sum(int(line[1:]) for line in first) / 200 < 650
    assert read(1) == first
    assert read(2) != first
    assert [line[0] for line in read(1, joint=False)] == ["s"] * 200 + ["t"] * 200


def test_words_are_whole_and_as_many_as_there_are() -> None:
    texts = [("to be or", "be.it"), ("not to be", "so_be.it be.it")]
    sides = tokenizer.train(texts, TokenizerConfig(kind="word", joint=False))
    assert [side.size for side in sides] == [4 + 4, 4 + 2]
    assert sides.target.pieces(sides.target.encode("so_be.it  be.it")) == ["▁so_be.it", "▁be.it"]
    ids = sides.source.encode("to be sure")
    assert ids[2] == UNK
    assert sides.source.decode(ids[:2]) == "to be"


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_out_of_bounds_names_the_bound_that_works(kind: Kind) -> None:
    for asked, word in ((5000, "most"), (261, "least")):
        said = rf"tokenizer\.vocabulary={asked}: must be at {word} \d+ for this text"
        with pytest.raises(ValueError, match=said) as caught:
            tokenizer.train(pairs(), TokenizerConfig(kind=kind, vocabulary=asked))
        bound = int(re.findall(r"\d+", str(caught.value))[1])
        works = TokenizerConfig(kind=kind, vocabulary=bound)
        assert tokenizer.train(pairs(), works).source.size == bound


def test_training_needs_text() -> None:
    for empty in ([], [(" ", "")]):
        with pytest.raises(ValueError, match="no text to train on"):
            tokenizer.train(empty, TokenizerConfig())
    with pytest.raises(ValueError, match=r"SentencePiece failed: .*a is already defined"):
        tokenizer.train(pairs(), TokenizerConfig(symbols=("a", "a")))


@pytest.mark.parametrize("joint", [True, False])
def test_saved_tokenizers_load(tmp_path: Path, joint: bool) -> None:
    other = trained() if joint else Tokenizer(made_elsewhere())
    tokenizers = Tokenizers(trained(), other)
    tokenizer.save(tokenizers, tmp_path)
    names = ["tokenizer.model"] if joint else ["source.model", "target.model"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    digests = [coder.digest for coder in tokenizers]
    loaded = tokenizer.load(tmp_path, digests)
    assert [coder.model for coder in loaded] == [coder.model for coder in tokenizers]
    assert (loaded.source is loaded.target) == joint
    with pytest.raises(ValueError, match=rf"{names[-1]}: is damaged or is not the one"):
        tokenizer.load(tmp_path, [digests[0], "0" * 64])


def test_models_are_given_by_path(tmp_path: Path) -> None:
    paths = [tmp_path / "a.model", tmp_path / "b.model"]
    paths[0].write_bytes(trained().model)
    paths[1].write_bytes(made_elsewhere())
    one = tokenizer.train([], TokenizerConfig(models=(str(paths[0]),)))
    assert one.source is one.target
    assert one.source.model == trained().model
    two = tokenizer.train([], TokenizerConfig(models=tuple(map(str, paths)), joint=False))
    assert [two.source.model, two.target.model] == [trained().model, made_elsewhere()]


@pytest.mark.parametrize("damage", [b"", b"no model", "cut", "missing"])
def test_damaged_models_are_named(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "tokenizer.model"
    if damage != "missing":
        path.write_bytes(trained().model[:-9] if damage == "cut" else damage)
    said = "No such file" if damage == "missing" else "not a SentencePiece model, or a damaged one"
    with pytest.raises(ValueError, match=rf"^tokenizer .*tokenizer\.model: {said}"):
        tokenizer.train([], TokenizerConfig(models=(str(path),)))
    with pytest.raises(ValueError, match=rf"^tokenizer .*tokenizer\.model: {said}"):
        tokenizer.load(tmp_path, [trained().digest] * 2)
