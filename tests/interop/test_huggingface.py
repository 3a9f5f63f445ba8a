"""MarianMT models of transformers, read and written: logits and texts are those of transformers."""

import json
import random
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import sentencepiece
from common import error_line, with_rare
from corpus_files import sentencepiece_model
from safetensors.numpy import load_file, save_file

from transformer_jax.cli.main import main
from transformer_jax.config import AttentionConfig, ModelConfig
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.interop.huggingface import load
from transformer_jax.interop.huggingface_export import check, export
from transformer_jax.models.make import make_model
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import EOS, PAD, UNK
from transformer_jax.training.oracles import random_params
from transformer_jax.types import Batch

POSITIONS = "model.encoder.embed_positions.weight"
REASON = "needs transformers and PyTorch: pip install '.[peers]'"
MODEL = ModelConfig(layers=2, d_model=16, heads=2, d_ff=24, max_length=40, dropout=0.0)
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {"scale_embedding": True, "activation_function": "swish"},
    "separate": {"share_encoder_decoder_embeddings": False, "activation_function": "relu"},
    "untied": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
}


@pytest.fixture(scope="module")
def hub() -> Any:
    """The package transformers."""
    pytest.importorskip("torch", reason=REASON)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", reason=REASON)
        assert transformers.MarianMTModel is not transformers.MarianTokenizer  # loads both
    transformers.utils.logging.disable_progress_bar()
    return transformers


def sentences(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(400)]
    return [" ".join(draw.choices(words, k=draw.randint(3, 8))) for _ in range(count)]


def write_vocabularies(folder: Path, *, separate: bool) -> list[int]:
    """Writes SentencePiece models, whose ids differ from those of vocab.json. Returns the sizes."""
    pieces: list[list[str]] = []
    for seed, side in enumerate(("source", "target")):
        size = 280 + 10 * seed
        model = sentencepiece_model(sentences(seed, 300), vocab_size=size)
        (folder / f"{side}.spm").write_bytes(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        pieces.append([processor.id_to_piece(i) for i in range(3, size)][:-5])
    begin = ["</s>", "<unk>"]
    if separate:
        tables = [[*begin, "<pad>", *side] for side in pieces]
    else:
        tables = [[*begin, ">>deu<<", *dict.fromkeys(pieces[0] + pieces[1]), "<pad>"]]
    for table, name in zip(tables, ("vocab.json", "target_vocab.json"), strict=False):
        (folder / name).write_text(json.dumps({piece: i for i, piece in enumerate(table)}))
    options = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": separate}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return [len(tables[0]), len(tables[-1])]


def write_model(hub: Any, folder: Path, name: str) -> Path:
    """Saves a model with random parameters, whose predictions are peaked."""
    torch = pytest.importorskip("torch", reason=REASON)

    folder.mkdir()
    sizes = write_vocabularies(folder, separate=name == "separate")
    pad = 2 if name == "separate" else sizes[0] - 1
    special = {"pad_token_id": pad, "eos_token_id": 0}
    special["decoder_start_token_id"] = pad
    shape = {"d_model": 16, "max_position_embeddings": 64, "dropout": 0.0}
    for side, size in zip(("encoder", "decoder"), (1, 2), strict=True):
        shape |= {f"{side}_layers": size, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 24}
    shape |= {"vocab_size": sizes[0], "decoder_vocab_size": sizes[1]}
    torch.manual_seed(0)
    model = hub.MarianMTModel(hub.MarianConfig(**shape, **special, **SHAPES[name]))
    with torch.no_grad():
        for path, value in model.named_parameters():
            if "embed_positions" not in path:
                norm = "norm" in path and path.endswith("weight")
                value.normal_(float(norm), 0.2 if "bias" in path or norm else 0.5)
        for table in (model.model.encoder.embed_tokens, model.model.decoder.embed_tokens):
            table.weight[pad] = 0
        model.final_logits_bias.normal_(0, 0.5)
        model.final_logits_bias[0, 0] = 5
    model.generation_config = hub.GenerationConfig(
        num_beams=4, max_length=60, bad_words_ids=[[pad], [1]], renormalize_logits=True, **special
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=with_rare(SHAPES, ("separate", "untied")))
def folder(hub: Any, request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    return write_model(hub, tmp_path_factory.mktemp("hub") / request.param, request.param)


@pytest.fixture(scope="module")
def tied(hub: Any, tmp_path_factory: Any) -> Path:
    return write_model(hub, tmp_path_factory.mktemp("hub") / "tied", "tied")


def pretrained(hub: Any, folder: Path) -> tuple[Any, Any]:
    model, tokenizer = hub.MarianMTModel.from_pretrained, hub.MarianTokenizer.from_pretrained
    return model(folder).eval(), tokenizer(folder)


def texts(hub: Any, folder: Path, lines: list[str], **search: Any) -> list[str]:
    model, tokenizer = pretrained(hub, folder)
    outputs = model.generate(**tokenizer(lines, return_tensors="pt", padding=True), **search)
    return tokenizer.batch_decode(outputs, skip_special_tokens=True)


def their_ids(folder: Path, tokenizers: Any) -> list[list[int]]:
    """Their ids in the order of ours, for source and target; -1: they have none."""
    tables = [json.loads((folder / "vocab.json").read_text())] * 2
    if (folder / "target_vocab.json").exists():
        tables[1] = json.loads((folder / "target_vocab.json").read_text())
    return [
        [table.get(piece.replace("▁>>", ">>"), -1) for piece in side.pieces(range(side.size))]
        for side, table in zip(tokenizers, tables, strict=True)
    ]


def assert_same_logits(hub: Any, folder: Path, config: Any, tokenizers: Any, params: Any) -> None:
    """Ids of sources are those of their tokenizer, and logits those of their model."""
    torch = pytest.importorskip("torch", reason=REASON)

    model, tokenizer = pretrained(hub, folder)
    ours: Any = jax.jit(make_model(config, *tokenizers.sizes).apply)
    of_source, of_target = map(np.array, their_ids(folder, tokenizers))
    assert {*of_target} - {-1} == {*range(model.config.decoder_vocab_size)}
    columns = np.array([i for i, id in enumerate(of_target) if id >= 0 and i not in (PAD, UNK)])
    start = model.config.decoder_start_token_id
    language = [">>deu<< bada"] if ">>deu<<" in tokenizer.get_vocab() else []
    for line in [*sentences(0, 2), "bada, 123", *language]:
        source = np.array([*tokenizers.source.encode(line), EOS])
        theirs = tokenizer(line)["input_ids"]
        unknown = tokenizer.unk_token_id
        assert np.where(of_source < 0, unknown, of_source)[source].tolist() == theirs
        target = np.random.default_rng(0).choice(columns[columns > EOS], 9)
        begin = np.array([config.start_id, *target])
        batch = Batch(*(ids[None].astype(np.int32) for ids in (source, begin, begin)))
        with torch.no_grad():
            wanted = model(
                input_ids=torch.tensor([theirs]),
                decoder_input_ids=torch.tensor([[start, *of_target[target].tolist()]]),
            ).logits[0]
        logits = np.asarray(ours({"params": params}, batch).logits[0])[:, columns]
        wanted = wanted.numpy()[:, of_target[columns]]
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4)


def same(ours: list[Any], theirs: list[str]) -> float:
    return float(np.mean([str(a) == b for a, b in zip(ours, theirs, strict=True)]))


@pytest.fixture(scope="module")
def again(folder: Path) -> tuple[Path, Path]:
    """The run of an imported model, and the folder to which it is exported again."""
    run, out = folder.with_name("run"), folder.with_name("out")
    main(["import", str(folder), f"--run={run}"])
    main(["export", f"--run={run}", "--format=huggingface", f"--out={out}"])
    return run, out


def test_an_imported_model_has_the_logits_of_transformers(
    hub: Any, folder: Path, again: tuple[Path, Path]
) -> None:
    run, out = again
    translator = Translator.load(run)
    ours = translator.config.model, translator.tokenizers, translator.params
    for each in (folder, out):
        assert_same_logits(hub, each, *ours)
    old, new = (json.loads((each / "vocab.json").read_text()) for each in (folder, out))
    assert [*new][: len(old)] == [*old]  # and pieces that had no id


@pytest.mark.slow
def test_an_imported_model_translates_as_in_transformers(
    hub: Any, folder: Path, again: tuple[Path, Path]
) -> None:
    (run, out), lines = again, sentences(5, 100)
    translator = Translator.load(run)
    decode = translator.config.decode
    assert (decode.beam, decode.suppress, decode.max_length) == (4, ("<unk>",), 59)
    greedy = translator.with_search(replace(decode, beam=1))(lines)
    found = translator(lines)
    assert len({*map(str, found)}) > 20
    assert min(same(greedy, texts(hub, each, lines, num_beams=1)) for each in (folder, out)) >= 0.99
    assert min(same(found, texts(hub, each, lines)) for each in (folder, out)) >= 0.99


@pytest.mark.long
@pytest.mark.parametrize("early", [True, "never"])
def test_searches_are_as_theirs(hub: Any, tied: Path, tmp_path: Path, early: Any) -> None:
    options = json.loads((tied / "generation_config.json").read_text())
    folder = shutil.copytree(tied, tmp_path / "model")
    options |= {"length_penalty": 0.6, "early_stopping": early, "num_beams": 3, "max_length": 40}
    (folder / "generation_config.json").write_text(json.dumps(options))
    main(["import", str(folder), f"--run={tmp_path / 'run'}"])
    translator, lines = Translator.load(tmp_path / "run"), sentences(5, 100)
    found = translator(lines)
    assert same(found, texts(hub, folder, lines)) >= 0.99
    plain = translator.with_search(replace(translator.config.decode, alpha=1.0))(lines)
    assert same(plain, [*map(str, found)]) < 0.99


@pytest.mark.parametrize("start", [pytest.param(1, marks=pytest.mark.long), None])
def test_a_run_of_our_own_is_the_same_in_transformers(
    start: int | None, hub: Any, finished: Run, tmp_path: Path
) -> None:
    config = replace(MODEL, decoder_start_id=start, tied=finished.config.model.tied)
    params = random_params(make_model(config, *finished.tokenizers.sizes))
    run = replace(finished, config=replace(finished.config, model=config))
    export(run, 1, params, tmp_path / "out")
    assert_same_logits(hub, tmp_path / "out", config, run.tokenizers, params)
    assert load(tmp_path / "out").model.decoder_start_id == start


@pytest.mark.long
def test_the_program_in_the_folder_translates(hub: Any, tied: Path, tmp_path: Path) -> None:
    main(["import", str(tied), f"--run={tmp_path / 'run'}"])
    out = tmp_path / "out"
    main(["export", f"--run={tmp_path / 'run'}", "--format=huggingface", f"--out={out}"])
    (program,) = re.findall("```python\n(.*?)```", (out / "README.md").read_text(), re.S)
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, cwd=out, check=True, capture_output=True, text=True)
    wanted = Translator.load(tmp_path / "run")(["A sentence.", "Another one."])
    assert printed.stdout.splitlines() == wanted


def change(name: str, **values: Any) -> Callable[[Path], None]:
    """Returns a function that changes options in the file `name` of a folder."""

    def apply(folder: Path) -> None:
        options = json.loads((folder / name).read_text()) | values
        (folder / name).write_text(json.dumps(options))

    return apply


def change_arrays(function: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        arrays = load_file(folder / "model.safetensors")
        function(arrays)
        save_file(arrays, folder / "model.safetensors")

    return apply


def written(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "config.json").write_text(text)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def enlarged(folder: Path) -> None:
    count = len(json.loads((folder / "vocab.json").read_text()))
    change("vocab.json", new=count)(folder)


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickle": (pickled, "pytorch_model.bin is a pickle, which may execute code; convert it"),
    "cut": (cut, "model.safetensors: cannot be read"),
    "output": (
        change_arrays(lambda x: x.update({"lm_head.weight": x["model.shared.weight"] + 1})),
        "lm_head.weight: differs from model.shared.weight",
    ),
    "nan": (
        change_arrays(lambda x: x.update({"final_logits_bias": x["final_logits_bias"] * np.nan})),
        "final_logits_bias: holds numbers that are not finite",
    ),
    "positions": (
        change_arrays(lambda x: x.update({POSITIONS: np.ones((8, 16), np.float32)})),
        f"{POSITIONS}: must be the sinusoids",
    ),
    "integers": (
        change_arrays(lambda x: x.update({"final_logits_bias": np.ones((1, 9), np.int32)})),
        "final_logits_bias: is of the type int32",
    ),
    "missing option": (written("{}"), "no option"),
    "family": (change("config.json", model_type="bart"), "model_type='bart'"),
    "activation": (
        change("config.json", activation_function="gelu_new"),
        "activation_function='gelu_new': has no counterpart here; must be 'gelu' or 'relu'",
    ),
    "norm": (change("config.json", normalize_embedding=True), "normalize_embedding=True"),
    "heads": (change("config.json", decoder_attention_heads=4), "decoder_attention_heads=4"),
    "start": (
        change("generation_config.json", decoder_start_token_id=10**6),
        "decoder_start_token_id=1000000",
    ),
    "vocabulary": (change("vocab.json", new=0), "vocab.json: the ids of the pieces"),
    "larger vocabulary": (enlarged, "has [0-9]+ rows; must be"),
    "token": (change("tokenizer_config.json", eos_token="<end>"), "eos_token='<end>'"),
    "bad words": (
        change("generation_config.json", bad_words_ids=[[1, 2]]),
        r"bad_words_ids: holds \[1, 2\]; must hold lists of one id",
    ),
    "bad words of another type": (
        change("generation_config.json", bad_words_ids=5),
        "config.json or generation_config.json: 'int' object is not iterable",
    ),
    "penalty": (change("generation_config.json", length_penalty="x"), "generation_config.json: "),
    "ids": (change("vocab.json", new="x"), "vocab.json: the ids of the pieces must be different"),
    "nested": (change("vocab.json", new=[1]), "vocab.json: must hold the id of each piece"),
    "weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "model.safetensors: no such file$",
    ),
    "sampling": (change("generation_config.json", do_sample=True), "do_sample=True"),
    "not JSON": (written("{"), "config.json: not JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_models_are_refused_in_one_line(
    name: str, tied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, message = BAD[name]
    folder, run = shutil.copytree(tied, tmp_path / "model"), tmp_path / "run"
    spoil(folder)
    assert re.search(message, error_line(["import", str(folder), f"--run={run}"], capsys))
    assert not run.exists()


def test_an_end_by_force_takes_one_of_the_tokens(tied: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tied, tmp_path / "model")
    change("generation_config.json", forced_eos_token_id=0)(folder)
    lengths = [load(each).decode.max_length for each in (folder, tied)]
    assert lengths == [58, 59]  # of 60 with the start symbol


def test_half_precision_is_read_as_float32(tied: Path, tmp_path: Path) -> None:
    folder, wanted = shutil.copytree(tied, tmp_path / "model"), load(tied).params
    for kind in ("float16", "bfloat16"):
        arrays = load_file(tied / "model.safetensors")
        save_file(
            {name: x.astype(kind) for name, x in arrays.items()}, folder / "model.safetensors"
        )
        read = load(folder).params
        assert {leaf.dtype.name for leaf in jax.tree.leaves(read)} == {"float32"}
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-2, atol=1e-3), read, wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "pre"}, "model.norm='pre': MarianMT cannot express it; it must be post"),
        ({"kv_heads": 1}, "model.kv_heads=1"),
        ({"positions": "rotary"}, "model.positions='rotary'"),
        ({"position_wavelengths": "marian"}, "model.position_wavelengths='marian'"),
        ({"activation": "swiglu"}, "model.activation='swiglu'"),
        ({"embedding_scale": 2.0}, "model.embedding_scale=2.0"),
        ({"norm_eps": 1e-3}, "model.norm_eps=0.001"),
        ({"bias": False}, "model.bias=False"),
        ({"cross_attention": AttentionConfig(kind="hard", layer=1)}, "cross_attention.kind='hard'"),
    ],
)
def test_what_marian_lacks_is_not_exported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(replace(MODEL, **changes))
