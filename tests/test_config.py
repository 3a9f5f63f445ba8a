"""The config: strict, validated, JSON in and out; every file in configs/ loads."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from transformer_jax.config import (
    TINY,
    AttentionConfig,
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
    describe,
    differences,
    from_json,
    load_config_file,
    require_decided,
    to_json,
)
from transformer_jax.errors import UserError

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_file_is_found_by_its_name_anywhere_and_survives_json(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / path.stem).mkdir()  # such as the folder of a run
    config = load_config_file(path)
    assert load_config_file(path.stem) == config
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize("name", ["quickstat", "quickstart.", "x", "", ".."])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    names = ", ".join(sorted(path.stem for path in CONFIGS))
    with pytest.raises(UserError, match=re.escape(f"config {name!r}: unknown")) as caught:
        load_config_file(name)
    assert str(caught.value).endswith(f"; known: {names}")


@pytest.mark.parametrize("name", ["c.json", "c.JSON", "config.py.json", "c.txt"])
def test_other_files_are_never_executed(name: str, tmp_path: Path) -> None:
    path, trace = tmp_path / name, tmp_path / "trace"
    path.write_text(f"{{'a': open({str(trace)!r}, 'w')}}")
    with pytest.raises(UserError, match=re.escape(f"{path}: is not executed")):
        load_config_file(path)
    assert not trace.exists()


def test_a_description_holds_what_differs_from_the_defaults() -> None:
    assert describe(Config()) == []
    config = replace(
        Config(),
        model=ModelConfig(layers=2, norm="pre", cross_attention=AttentionConfig(kind="latent")),
        data=DataConfig(train=("a\tb.tsv",)),
    )
    assert describe(config) == [
        "model       layers=2  norm='pre'  cross_attention.kind='latent'",
        r"data        train=('a\tb.tsv',)",
    ]


BAD = [
    ({"model": {"layrs": 3}}, "model.layrs: unknown key; did you mean layers"),
    ({"model": {"layers": "4"}}, "model.layers='4': must be a whole number"),
    ({"model": {"dropout": "a"}}, "model.dropout='a': must be a number"),
    ({"model": {"dropout": float("nan")}}, "model.dropout=nan: must be a finite number"),
    ({"model": {"dropout": 10**400}}, "model.dropout=10+: must be a finite number"),
    ({"decode": {"alpha": 1e39}}, "alpha=1e\\+39: must be a finite number, below 2"),
    ({"model": {"heads": 7}}, "model.heads=7: must be a divisor of model.d_model=512, such as 8"),
    ({"model": {"d_ff": -1}}, "model.d_ff=-1: must be above 0"),
    ({"model": {"dropout": 1.0}}, "model.dropout=1.0: must be at least 0 and below 1"),
    ({"model": {"norm": "both"}}, "model.norm='both': must be one of post, pre"),
    ({"model": {"d_model": 9, "heads": 3}}, "model.d_model=9: must be even"),
    ({"model": 3}, "model=3: must be an object"),
    ({"execution": {"executor": "pmap", "deterministic": True}}, "deterministic=True: must be Fal"),
    ({"data": {"train": "a"}}, "data.train='a': must be a list"),
    ({"data": {"train": ["a\0b"]}}, r"data.train='a.x00b': must be Unicode text without NUL"),
    ({"data": {"fields": ["a"]}}, r"data.fields=\['a'\]: must have 2 items"),
    ({"data": {"weights": [1.0, 1.0]}}, r"data.weights=\(1.0, 1.0\): must be 1, one for each"),
    ({"data": {"train": ["a", "b"], "weights": [-1.0, 2.0]}}, r"\(-1.0, 2.0\): must be at least 0"),
    ({"data": {"weights": [1.0], "temperature": 2.0}}, "data.temperature=2.0: must be None where"),
    ({"train": {}}, "train.steps=None: set train.steps, train.epochs or train.minutes"),
    ({"tokenizer": {"vocabulary": 100}}, "tokenizer.vocabulary=100: must be above 260"),
    (
        {"tokenizer": {"sampling": 1.0}},
        "tokenizer.sampling=1.0: must be below 1 for tokenizer.kind",
    ),
    (
        {"tokenizer": {"kind": "word", "sampling": 0.1}},
        "sampling=0.1: must be 0 for tokenizer.kind",
    ),
    (
        {"model": {"dropout": 0.0}, "optimizer": {"r_drop": 5.0}},
        "r_drop=5.0: must be 0 where model",
    ),
    ({"optimizer": {"accumulate": 2, "microbatch_tokens": 512}}, "accumulate=2: must be 1 where"),
    ({"tokenizer": {"joint": False}}, "model.tied='all': must be decoder or none"),
]


@pytest.mark.parametrize(("value", "message"), BAD)
def test_bad_values_are_refused_by_name(value: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(value)


def test_bad_values_are_refused_from_python_too() -> None:
    with pytest.raises(ValueError, match=r"model\.heads=5"):
        replace(TINY, heads=5)
    assert type(from_json({"dropout": 0}, ModelConfig, "model.").dropout) is float


def test_differences_name_the_fields_that_make_another_run() -> None:
    old = Config(model=TINY)
    longer = replace(
        old,
        train=TrainConfig(steps=7, keep=9),
        data=DataConfig(workers=9),
        decode=DecodeConfig(beam=1, penalty="power", alpha=1.0, batch_tokens=64),
    )
    assert differences(old, longer) == []
    other = replace(longer, model=replace(TINY, heads=8), optimizer=OptimizerConfig(warmup=1))
    assert differences(old, other) == ["model.heads: 4 -> 8", "optimizer.warmup: 4000 -> 1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "defines no function get_config"),
        ("def get_config():\n    return 3", "must return a Config, not 3"),
        ("import nothing_of_the_kind", "ModuleNotFoundError"),
        ("def get_config(:", "SyntaxError"),
        ("def get_config():\n    return {}['mine']", "KeyError: 'mine'"),
    ],
)
def test_bad_config_files_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_config_file(path)
    assert str(path) in str(caught.value)


def test_config_files_are_compiled_as_if_alone(tmp_path: Path) -> None:
    """The annotations of config.py are strings; those of a user's file are what they say."""
    path = tmp_path / "c.py"
    path.write_text(
        "from transformer_jax.config import Config\n"
        "def get_config(depth: int = 1) -> Config:\n"
        "    assert get_config.__annotations__ == {'depth': int, 'return': Config}\n"
        "    return Config()\n"
    )
    assert load_config_file(path) == Config()


def test_alpha_may_be_1_or_more() -> None:
    """It is an exponent, not a probability. For a user's model, the kind of the file decides."""
    assert TokenizerConfig(kind="unigram", sampling=1.5).sampling == 1.5
    assert TokenizerConfig(models=("my.model",), sampling=1.5).sampling == 1.5


def test_vocabulary_and_joint_go_together() -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.models=.*two paths"):
        TokenizerConfig(joint=False, models=("a.model",))
    with pytest.raises(ValueError, match=r"tokenizer\.symbols=.*empty when tokenizer\.models"):
        TokenizerConfig(models=("a.model",), symbols=("<?>",))


FIELDS = ("model.layers", "optimizer.warmup", "train.steps", "data.batch_tokens", "decode.top_k")


@pytest.mark.parametrize("field", [*FIELDS, "train.seed", "decode.seed"])
def test_integers_have_32_bits(field: str) -> None:
    section, _, name = field.partition(".")
    least, end = (0, 2**32) if name == "seed" else (-(2**31), 2**31)
    said = rf"must be at least {least} and below 2\^{end.bit_length() - 1}$"
    for value in (least - 1, end, 2**63, 10**30):
        with pytest.raises(ValueError, match=rf"^{re.escape(field)}={value}: {said}"):
            from_json({section: {name: value}})


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("model", {"dropout": 0.0, "attention_dropout": 0.2, "max_length": 99}, ""),
        ("model", {"decoder_layers": 6, "kv_heads": 8, "dtype": "bfloat16"}, ""),
        ("model", {"cross_attention": AttentionConfig(kind="hard")}, ""),
        ("tokenizer", {"sampling": 0.1}, ""),
        ("train", {"steps": 3}, ""),
        ("model", {"layers": 2, "decoder_layers": 6}, "model.layers=2: must be 6"),
        ("model", {"kv_heads": 2}, "model.kv_heads=2: must be 8"),
        ("model", {"d_ff": 64, "norm": "pre"}, "model.d_ff=64: must be 2048; model.norm='pre': m"),
        (
            "model",
            {"positions": "learned", "max_length": 9},
            "model.positions='learned': must be 'sinusoidal'",
        ),
        ("tokenizer", {"vocabulary": 4000}, "tokenizer.vocabulary=4000: must be 8000"),
        ("tokenizer", {"symbols": ("<x>",)}, "tokenizer.symbols=('<x>',): must be ()"),
    ],
)
def test_a_run_decides_what_its_parameters_and_tokenizers_need(
    section: str, values: dict[str, Any], message: str
) -> None:
    old = Config()
    new = replace(old, **{section: replace(getattr(old, section), **values)})
    if not message:
        require_decided("run r", old, new)
        return
    wanted = f"run r: its parameters and tokenizers decide {message}"
    with pytest.raises(UserError, match=re.escape(wanted)):
        require_decided("run r", old, new)


def test_learned_positions_decide_the_greatest_length() -> None:
    old = Config(model=ModelConfig(positions="learned", max_length=40))
    longer = replace(old, model=replace(old.model, max_length=50))
    with pytest.raises(UserError, match=r"decide model\.max_length=50: must be 40$"):
        require_decided("run r", old, longer)
