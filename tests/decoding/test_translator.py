"""Text in, translations out: hypotheses with text, ids and scores."""

import pickle
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
from common import Patch

from transformer_jax.config import DecodeConfig, MeshConfig
from transformer_jax.decoding import loop
from transformer_jax.decoding.translator import Hypothesis, Translation, Translator
from transformer_jax.errors import UserError
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import EOS, PAD

LINES = ["red old", "", "blue new green"]


def test_translations_hold_what_was_asked_for(finished: Run) -> None:
    """Text, ids and score of the n best hypotheses, best first; the text is that of the ids."""
    translator = Translator.load(finished.folder, decode=DecodeConfig(beam=3, n_best=3))
    one, blank, other = translator.stream(LINES)
    assert blank.text == ""
    assert len(blank.hypotheses) == 1
    assert max(len(each.hypotheses) for each in (one, other)) > 1
    for translation in (one, other):
        assert 1 <= len(translation.hypotheses) <= 3
        scores = [hypothesis.score for hypothesis in translation.hypotheses]
        assert scores == sorted(scores, reverse=True)
        assert np.isfinite(scores).all()
        assert len({hypothesis.ids for hypothesis in translation.hypotheses}) == len(scores)
        for text, ids, *_ in translation.hypotheses:
            assert PAD not in ids
            assert EOS not in ids[:-1]
            assert text == translator.tokenizers.target.decode([i for i in ids if i != EOS])
    best = [translation.text for translation in translator.stream(LINES)]
    assert best == translator(LINES) == [one.text, "", other.text]


def test_a_translation_arrives_before_the_next_line_is_sent(finished: Run) -> None:
    translator = Translator.load(finished.folder)
    sent: queue.Queue[str | None] = queue.Queue()
    translations = translator.stream(iter(lambda: sent.get(timeout=60), None), iter([""] * 3))
    for line in LINES:
        sent.put(line)
        assert next(translations) == translator(line)
    sent.put(None)
    assert list(translations) == []


def test_a_translation_that_stops_without_an_end_symbol_is_truncated() -> None:
    each = [Translation([Hypothesis("", ids, 0.0, 0.0)], "x") for ids in ((), (5, EOS), (5,))]
    assert [one.truncated for one in each] == [False, False, True]
    assert Translation.joined(each[::-1], "xxx").truncated


def test_a_translation_can_be_copied(finished: Run) -> None:
    for line, translation in zip(LINES, Translator.load(finished.folder)(LINES), strict=True):
        copied = pickle.loads(pickle.dumps(translation))
        assert copied == translation
        assert (copied.source, copied.hypotheses) == (line, translation.hypotheses)


@pytest.mark.parametrize("changes", [{"beam": 3}, {"sample": True, "n_best": 2, "seed": 3}])
def test_outputs_begin_with_their_prefix(finished: Run, changes: dict[str, Any]) -> None:
    translator = Translator.load(finished.folder, decode=DecodeConfig(**changes))
    prefixes = ["neu", "", "grün alt"]
    translations = list(translator.stream(LINES, prefixes))
    for prefix, translation in zip(prefixes, translations, strict=True):
        for hypothesis in translation.hypotheses:
            assert hypothesis.text.startswith(prefix)
    assert translations[1].text == ""
    with pytest.raises(UserError, match="line 2: has no prefix; give one, or a blank line, each"):
        list(translator.stream(LINES, ["neu"]))
    most = "line 3: its prefix has [0-9]+ tokens; must be below the greatest length of its output"
    with pytest.raises(UserError, match=most):
        list(translator.stream(LINES, ["", "", "grün " * 100]))


def on_devices(run: Run, devices: int, tokens: int, **mesh: int) -> Translator:
    """A translator on a mesh."""
    decode = DecodeConfig(beam=2, batch_tokens=tokens)
    chosen = make_mesh(MeshConfig(**mesh), jax.devices()[:devices])
    return Translator.load(run.folder, decode=decode, mesh=chosen)


def test_devices_search_batches_of_their_own(finished: Run, monkeypatch: Patch) -> None:
    """With the results of one device to the last bit. A mesh that splits the model shares them."""
    lines = [f"red {'blue ' * (i % 7)}old" for i in range(40)]
    alone = on_devices(finished, 1, 128)(lines)
    used: list[set[Any]] = []
    of_loop = loop.Loop.run_jobs

    def run_jobs(self: loop.Loop) -> None:
        used.append({*jax.tree.leaves(self.params)[0].devices()})
        of_loop(self)

    monkeypatch.setattr(loop.Loop, "run_jobs", run_jobs)
    several = on_devices(finished, 3, 128)(lines)
    assert [each.hypotheses for each in several] == [each.hypotheses for each in alone]
    assert {len(devices) for devices in used} == {1}
    assert set[Any]().union(*used) == {*jax.devices()[:3]}
    used.clear()
    assert on_devices(finished, 2, 128, tensor=2)(lines) == alone
    assert used == [{*jax.devices()[:2]}]


@pytest.mark.parametrize("devices", [1, 8])
def test_lines_are_counted_once_they_are_translated(devices: int, finished: Run) -> None:
    """By the threads of one device and of several."""
    mesh = make_mesh(devices=jax.devices()[:devices])
    decode = DecodeConfig(beam=2, batch_tokens=128)
    lines = [f"red {'blue ' * (i % 7)}" if i % 5 else "" for i in range(40)]
    counts: list[int] = []
    Translator.load(finished.folder, decode=decode, mesh=mesh).translate(lines, done=counts.append)
    assert sum(counts) == len(lines)
    assert len(counts) > 4


def test_invisible_characters_make_no_difference(finished: Run) -> None:
    translator = Translator.load(finished.folder, decode=DecodeConfig(beam=8))
    plain = translator.translate(["old new", ""], ["neu", ""], [["alt"], []])
    hidden = ["\u200fol\xadd\u2009n\0e\u2060w\ufeff", "\u200b\x85"]
    assert translator.translate(hidden, ["n\u202aeu", "\xad"], [["a\x90lt"], ["\u2066"]]) == plain


def test_phrases_are_lists(finished: Run) -> None:
    phrases: Any = ["neu"]
    with pytest.raises(UserError, match="line 1: its phrases are a text; give a list of texts"):
        Translator.load(finished.folder).translate(["new"], phrases=phrases)


def test_a_beam_is_as_large_as_the_phrases_need(finished: Run) -> None:
    translator = Translator.load(finished.folder, decode=DecodeConfig(beam=2))
    phrases = ["neu alt", "alt", "neu alt"]  # the first one holds the others
    least = len(translator.tokenizers.target.encode(phrases[0])) + 1
    with pytest.raises(UserError, match=f"line 2: decode.beam=2: must be at least {least}, one mo"):
        translator.translate(["new", "old"], phrases=[[], phrases])
    translator = translator.with_search(DecodeConfig(beam=least))
    assert "neu alt" in translator.translate(["old"], phrases=[phrases])[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("phrases", "prefix", "changes"),
    [
        (["neu"], "", {"suppress": ("▁neu",)}),
        (["neu neu"], "", {"no_repeat_ngrams": 1}),
        (["neu neu"], "alt " * 4, {"max_length": 5}),
    ],
)
def test_phrases_that_no_output_can_hold_are_refused(
    phrases: list[str], prefix: str, changes: dict[str, Any], finished: Run
) -> None:
    translator = Translator.load(finished.folder, decode=DecodeConfig(beam=8, **changes))
    with pytest.raises(UserError, match="line 4: no output holds its phrases"):
        translator.translate(["new", "old"], [prefix] * 2, [phrases, []], first=4)


@pytest.mark.long
def test_threads_may_share_a_translator(finished: Run) -> None:
    lines = [f"red {'blue ' * (i % 7)}" for i in range(48)]
    decode = DecodeConfig(beam=2, batch_tokens=64)
    mesh = make_mesh(devices=jax.devices()[:1])
    alone = Translator.load(finished.folder, decode=decode, mesh=mesh)
    wanted = [alone(line) for line in lines]
    shared = Translator.load(finished.folder, decode=decode, mesh=mesh)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(shared, lines)) == wanted
        assert list(pool.map(shared, [lines] * 4)) == [wanted] * 4


@pytest.mark.long
def test_samples_depend_on_seed_and_line_alone(finished: Run) -> None:
    def samples(seed: int, lines: list[str], tokens: int = 4096) -> list[list[str]]:
        decode = DecodeConfig(sample=True, n_best=4, seed=seed, batch_tokens=tokens)
        translations = Translator.load(finished.folder, decode=decode).stream(lines)
        return [[each.text for each in translation.hypotheses] for translation in translations]

    one = samples(0, ["red old", "blue new green", "red old"])
    assert one == samples(0, ["red old", "blue new green", "red old"], tokens=64)
    assert one[1:2] == samples(0, ["", "blue new green"])[1:]
    assert one[0] != one[2]
    assert one != samples(1, ["red old", "blue new green", "red old"])


@pytest.mark.long
def test_lengths_and_suppressed_pieces_bound_the_output(finished: Run) -> None:
    def ids(**changes: Any) -> list[tuple[int, ...]]:
        translator = Translator.load(finished.folder, decode=DecodeConfig(beam=2, **changes))
        return [translation.hypotheses[0].ids for translation in translator.stream(LINES[::2])]

    assert all(len(output) <= 3 for output in ids(max_length=3))
    assert all(len(output) >= 9 for output in ids(min_length=8))
    free = ids()
    assert ids(max_ratio=1e30) == ids(max_ratio=100.0)
    piece = Translator.load(finished.folder).tokenizers.target.pieces(free[0])[0]
    assert all(free[0][0] not in output for output in ids(suppress=(piece,)))
    with pytest.raises(UserError, match="piece 'nothing': is not in the tokenizer's vocabulary"):
        ids(suppress=("nothing",))


LONG = "red old. " * 20
"""A line that is longer than the model."""


def test_a_long_line_is_translated_in_parts(finished: Run) -> None:
    """Each as if it were a line, with the prefix at the beginning. It counts once."""
    translator = Translator.load(finished.folder, decode=DecodeConfig(beam=2, n_best=2))
    counts: list[int] = []
    short, long, blank = translator.translate(["red old.", LONG, " "], done=counts.append)
    assert sum(counts) == 3
    assert long == " ".join([short] * 20)
    assert long.source == LONG
    assert (short.parts, blank.parts) == ((), ())
    assert len(long.parts) == 20
    for one, several in zip(short.hypotheses, long.hypotheses, strict=True):
        assert several.text == " ".join([one.text] * 20)
        assert several.ids == one.ids * 20
        np.testing.assert_allclose(several.log_prob, 20 * one.log_prob, rtol=1e-5)
        np.testing.assert_allclose(several.score, 20 * one.score, rtol=1e-5)
    (begun,) = translator.translate([LONG], ["neu"])
    assert begun.parts[0].startswith("neu")
    assert begun.parts[1:] == long.parts[1:]
    with pytest.raises(UserError, match="line 7: is too long for phrases; give it as several"):
        translator.translate([LONG], phrases=[["neu"]], first=7)


def test_parts_stand_as_they_did(finished: Run) -> None:
    """Without a space between sentences that had none."""
    translator = Translator.load(finished.folder, decode=DecodeConfig(beam=1))
    long = translator("red。blue old！ " * 9)
    assert len(long.parts) == 18
    pairs = [f"{long.parts[i]}{long.parts[i + 1]}" for i in range(0, 18, 2)]
    assert long == " ".join(pairs)


@pytest.mark.long
def test_samples_of_parts_depend_on_the_line(finished: Run) -> None:
    decode = DecodeConfig(sample=True, n_best=2, seed=1)
    translator = Translator.load(finished.folder, decode=decode)
    long, short = translator([LONG, "blue new"])
    other = list(translator.stream(["blue new"], first=2))
    assert [each.text for each in short.hypotheses] == [each.text for each in other[0].hypotheses]
    assert len(long.parts) == 20
