"""Exported models, loaded again: CTranslate2's scores and text, StableHLO's states and ids."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import ctranslate2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import Capture, Patch, error_line, json_lines, printed, with_rare

from transformer_jax.cli.commands import Export
from transformer_jax.cli.main import main
from transformer_jax.config import AttentionConfig, DecodeConfig, ModelConfig, load_config_file
from transformer_jax.decoding.scoring import make_score
from transformer_jax.decoding.strategies import Lines, make_search
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.interop.ctranslate2 import export
from transformer_jax.interop.formats import FORMATS, describe_formats
from transformer_jax.models.make import make_model
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import BOS, EOS, PAD
from transformer_jax.text.tokenizer import Tokenizer
from transformer_jax.types import Batch

MODEL = ModelConfig(layers=2, d_model=32, heads=4, d_ff=64, max_length=40, dropout=0.0)
HARD = {"cross_attention": AttentionConfig(kind="hard", layer=1)}
EXPRESSIBLE: list[dict[str, Any]] = [
    {},
    {"norm": "pre", "activation": "gelu", "tied": "none", "output_bias": True},
    {"positions": "learned", "activation": "silu", "tied": "decoder", "bias": False},
    {"decoder_start_id": None, "activation": "quick_gelu"},
    {
        "activation": "swiglu",
        "position_layout": "halves",
        "position_wavelengths": "marian",
        "embedding_scale": 1.0,
    },
    {"positions": "relative", "kv_heads": 2},
    {"positions": "none"},
]


def random_model(config: ModelConfig, sizes: tuple[int, int]) -> tuple[Any, Any]:
    """A model whose norms and biases are random, too."""
    model, ids = make_model(config, *sizes), jnp.ones((1, 4), jnp.int32)
    params: Any = jax.jit(model.init)(jax.random.key(1), Batch(ids, ids, ids))["params"]
    noise = jax.random.key(2)
    return model, jax.tree.map(lambda x: x + 0.1 * jax.random.normal(noise, x.shape), params)


def with_model(run: Run, config: ModelConfig) -> Run:
    """The run with another model and the greedy search."""
    return replace(run, config=replace(run.config, model=config, decode=DecodeConfig(beam=1)))


def load_exported(config: ModelConfig, run: Run, params: Any, folder: Path) -> Any:
    """Exports a model with the run's tokenizers. Returns it as CTranslate2 loads it."""
    export(with_model(run, config), 1, params, folder)
    return ctranslate2.Translator(str(folder), compute_type="float32")


def random_sentences(
    tokenizer: Tokenizer, count: int, length: int
) -> tuple[np.ndarray, list[list[str]]]:
    """Sentences as ids, with the end symbol, and as pieces, without it."""
    ids = np.random.default_rng(0).integers(4, tokenizer.size, (count, length)).astype(np.int32)
    ids[:, -1] = EOS
    return ids, pieces_of(ids, tokenizer)


def pieces_of(ids: Any, tokenizer: Tokenizer) -> list[list[str]]:
    """The pieces of each row, without padding and the end symbol."""
    rows = np.asarray(ids).tolist()
    return [tokenizer.pieces([i for i in row if i not in (PAD, EOS)]) for row in rows]


def run_snippet(folder: Path, *sentences: str) -> list[str]:
    """The output of an exported folder's program, for which this package is not installed."""
    program = (
        "import runpy, sys; sys.modules['transformer_jax'] = None; sys.argv.pop(0); "
        "runpy.run_path(sys.argv[0])"
    )
    command = [sys.executable, "-c", program, str(folder / "translate.py"), *sentences]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.parametrize("changes", with_rare(EXPRESSIBLE, EXPRESSIBLE[1:]))
def test_ctranslate2_has_the_same_scores_and_text(
    changes: dict[str, Any], finished: Run, tmp_path: Path
) -> None:
    config, tokenizers = replace(MODEL, **changes), finished.tokenizers
    model, params = random_model(config, tokenizers.sizes)
    loaded = load_exported(config, finished, params, tmp_path / "exported")
    source, pieces = random_sentences(tokenizers.source, 20, 9)
    target, wanted = random_sentences(tokenizers.target, 20, 6)
    ours, _ = jax.jit(make_score([model]))([params], [source, target])
    theirs = [score.log_probs for score in loaded.score_batch(pieces, wanted)]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    ids = jax.jit(make_search([model], DecodeConfig(beam=1)))([params], Lines(source)).ids[:, 0]
    outputs = loaded.translate_batch(
        pieces, beam_size=1, max_decoding_length=28, suppress_sequences=[["<pad>"]]
    )
    assert pieces_of(ids, tokenizers.target) == [output.hypotheses[0] for output in outputs]


def test_the_program_beside_a_model_translates_as_the_run(finished: Run, tmp_path: Path) -> None:
    run, sentences = with_model(finished, finished.config.model), ["red old", "blue new green"]
    export(run, finished.best_step(), finished.params(), tmp_path / "exported")
    wanted = Translator.load(finished.folder, decode=run.config.decode)(sentences)
    assert run_snippet(tmp_path / "exported", *sentences) == wanted


@pytest.mark.long
def test_ctranslate2_finds_the_same_in_a_beam(finished: Run, tmp_path: Path) -> None:
    """With what the recipe's model has."""
    recipe, tokenizers = load_config_file("multi30k_en_de").model, finished.tokenizers
    chosen: Any = {name: getattr(recipe, name) for name in ("norm", "kv_heads", "positions")}
    config = replace(MODEL, output_bias=True, **chosen)
    model, params = random_model(config, tokenizers.sizes)
    params["output_bias"] = params["output_bias"].at[EOS].add(1.0)  # so that some outputs end
    params["output_bias"] = params["output_bias"].at[PAD].set(-1e4)
    loaded = load_exported(config, finished, params, tmp_path / "exported")
    source, pieces = random_sentences(tokenizers.source, 300, 9)
    search = {"beam_size": 4, "length_penalty": 0.8, "return_scores": True}
    lengths = {"min_decoding_length": 0, "max_decoding_length": 12}
    theirs = loaded.translate_batch(pieces, **search, **lengths)
    decode = DecodeConfig(beam=4, penalty="power", alpha=0.8, max_length=12)
    both = [make_search([model], replace(decode, early_stopping=early)) for early in (False, True)]
    optimal, early = (jax.jit(search)([params], Lines(source)) for search in both)
    ids = early.ids[:, 0]
    texts = pieces_of(ids, tokenizers.target)
    same = [text == other.hypotheses[0] for text, other in zip(texts, theirs, strict=True)]
    assert 50 < np.sum(np.any(ids == EOS, axis=1)) < 290
    assert np.mean(same) >= 0.99
    scores = np.array([other.scores[0] for other in theirs])
    np.testing.assert_allclose(early.scores[same, 0], scores[same], rtol=0, atol=1e-4)
    assert np.all(optimal.scores[:, 0] >= scores - 1e-4)
    assert np.any(optimal.scores[:, 0] > scores + 1e-3)


@pytest.mark.long
def test_int8_runs_translate_and_score_but_are_not_trained(
    finished: Run, tmp_path: Path, capsys: Capture
) -> None:
    out, source = tmp_path / "int8", tmp_path / "source"
    command = ["export", f"--run={finished.folder}", "--format=int8", f"--out={out}"]
    assert printed(command, capsys) == f"{out}: int8 of {finished.folder}\n"
    source.write_text("red old\n\nblue new green\n")
    outputs, losses, options = [], [], ("--beam=1", "--json")
    for run in (f"--run={finished.folder}", f"--run={out}"):
        outputs.append(json_lines(["translate", run, f"--input={source}", *options], capsys))
        losses.append(json_lines(["evaluate", run, *options], capsys)[0]["loss"])
    for whole, rounded in zip(*outputs, strict=True):
        assert whole["text"] == rounded["text"]
        assert whole["log_prob"] == pytest.approx(rounded["log_prob"], abs=0.3)
    assert outputs[0][0]["log_prob"] != outputs[1][0]["log_prob"]
    assert losses[1] == pytest.approx(losses[0], abs=0.02)
    translator = Translator.load(out)
    types = {str(leaf.dtype) for leaf in jax.tree.leaves(translator.params)}
    assert types == {"int8", "float32"}

    other = f"--out={tmp_path / 'a'}"
    train = ["train", "--config=configs/quickstart.py", f"--run={tmp_path / 'a'}"]
    only = f"run {out}: model.weights='int8': only translates and scores; use the run that it was"
    for command, message in (
        (["average", f"--run={out}", other], only),
        (["export", f"--run={out}", "--format=int8", other], only),
        ([*train, f"--init-from={out}"], only),
        ([*train, "--config.model.weights=int8"], "model.weights='int8': must be float32 to train"),
    ):
        assert message in error_line(command, capsys)
        assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "alibi"}, "model.positions='alibi': CTranslate2 cannot express it"),
        ({"self_layer": "mean"}, "model.self_layer='mean': CTranslate2 cannot express it"),
        ({"activation": "bilinear"}, "model.activation='bilinear': CTranslate2 cannot express it"),
        (HARD, "model.cross_attention.kind='hard': CTranslate2 cannot express it; it must be soft"),
    ],
)
def test_what_ctranslate2_lacks_is_refused(
    changes: dict[str, Any], message: str, finished: Run, tmp_path: Path
) -> None:
    config = replace(MODEL, **changes)
    with pytest.raises(UserError, match=message):
        export(with_model(finished, config), 1, {}, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
    reason = message.partition(": ")[0]
    wanted = f"int8, stablehlo; ctranslate2: no ({reason}); huggingface: no ({reason})"
    assert describe_formats(config) == wanted


def test_the_command_offers_all_formats() -> None:
    assert {*get_args(get_type_hints(Export)["format"])} == {*FORMATS}


@pytest.mark.long
def test_stablehlo_programs_run_for_any_batch_and_length(
    finished: Run, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "exported"
    command = ["export", f"--run={finished.folder}", "--format=stablehlo", f"--out={out}"]
    assert printed(command, capsys) == f"{out}: stablehlo of {finished.folder}\n"
    assert "exists already; name a new folder" in error_line(command, capsys)
    with np.load(out / "params.npz") as arrays:
        params = [arrays[name] for name in arrays.files]
    files = [bytearray((out / f"{name}.jax").read_bytes()) for name in ("encode", "step", "greedy")]
    encode, step, greedy = (partial(jax.export.deserialize(file).call, params) for file in files)
    tokenizers = finished.tokenizers
    model = make_model(finished.config.model, *tokenizers.sizes)
    search = jax.jit(make_search([model], replace(finished.config.decode, beam=1, n_best=1)))
    params = finished.params()
    for rows, width in ((3, 5), (1, 9)):
        draw = np.random.default_rng(width)
        source = draw.integers(4, tokenizers.source.size, (rows, width)).astype(np.int32)
        wanted = search([params], Lines(source)).ids[:, 0]
        np.testing.assert_array_equal(greedy(source), wanted)
        state, last = encode(source), np.full((rows, 1), BOS, np.int32)
        for index in range(4):
            logits, state = step(last, np.int32(index), state)
            last = np.argmax(np.asarray(logits)[:, PAD + 1 :], axis=1)[:, None].astype(np.int32) + 1
            before_end = ~np.any(np.asarray(wanted[:, :index]) == EOS, axis=1)
            np.testing.assert_array_equal(last[before_end, 0], wanted[before_end, index])
    sentences, decode = ["red old", "blue new green"], replace(finished.config.decode, beam=1)
    translated = Translator.load(finished.folder, decode=decode)(sentences)
    assert run_snippet(out, *sentences) == translated


def test_a_folder_appears_whole(finished: Run, tmp_path: Path, monkeypatch: Patch) -> None:
    out = tmp_path / "exported"
    command = ["export", f"--run={finished.folder}", "--format=ctranslate2", f"--out={out}"]
    main(command)
    assert {"model.bin", "config.json"} <= {path.name for path in out.iterdir()}

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformer_jax.interop.ctranslate2._fill_layer", fail)
    with pytest.raises(SystemExit):
        main([*command[:-1], f"--out={tmp_path / 'other'}"])
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]
