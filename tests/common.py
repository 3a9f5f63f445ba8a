"""Small models, batches and comparisons that several tests share."""

import json
import os
import random
import subprocess
import time
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from sentencepiece import SentencePieceProcessor

from tools.processes import finish
from transformer_jax.cli.launch import free_port as free_port
from transformer_jax.cli.main import main
from transformer_jax.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)
from transformer_jax.decoding.attention_weights import SentenceWeights
from transformer_jax.models.make import make_model
from transformer_jax.models.transformer import Model
from transformer_jax.special_ids import BOS, EOS, PAD, UNK
from transformer_jax.text.tokenizer import Tokenizer
from transformer_jax.training.losses import token_loss
from transformer_jax.training.oracles import decode_steps, gradient_errors, random_params
from transformer_jax.training.step import Averages, LossFn, LossSums
from transformer_jax.types import Batch, Params

Capture = pytest.CaptureFixture[str]
Log = pytest.LogCaptureFixture
Patch = pytest.MonkeyPatch
"""Types of pytest's fixtures, so that signatures are short."""


def on_devices(count: int) -> dict[str, str]:
    """Returns the environment of a process with `count` devices, which compiles as tests do."""
    return {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={count}")}


ONE_DEVICE = on_devices(1)

VOCABULARY = 11
LENGTHS = [(7, 6), (3, 2), (1, 4), (5, 1)]
"""Of four pairs: source, target."""


def with_rare(values: Iterable[Any], rare: Collection[Any]) -> list[Any]:
    """Parameters of tests: all values, of which only `make test-slow` tries those in `rare`."""
    return [pytest.param(each, marks=[pytest.mark.slow] * (each in rare)) for each in values]


def tiny(**changes: Any) -> ModelConfig:
    """The smallest model in which every part is present, without dropout."""
    small = {"layers": 1, "d_model": 16, "heads": 2, "d_ff": 24, "max_length": 16, "dropout": 0.0}
    return ModelConfig(**(small | changes))


def make_batch(
    lengths: Sequence[tuple[int, int]], source: int = 7, target: int = 6, seed: int = 0
) -> Batch:
    """Random sentences of the given (source, target) lengths; a length of 0 is an empty row."""
    draw = np.random.default_rng(seed)

    def ids(wanted: Sequence[int], width: int) -> np.ndarray:
        rows = draw.integers(UNK, VOCABULARY, (len(wanted), width)).astype(np.int32)
        for row, length in zip(rows, wanted, strict=True):
            row[length:] = PAD
            row[max(length - 1, 0) : length] = EOS
        return rows

    sources = ids([length for length, _ in lengths], source)
    targets = ids([length for _, length in lengths], target)
    return Batch(sources, shift_right(targets), targets)


def shift_right(targets: np.ndarray) -> np.ndarray:
    """What the decoder reads: the start id, then the targets but the last; no end symbol."""
    shifted = np.concatenate([np.full_like(targets[:, :1], BOS), targets[:, :-1]], axis=1)
    return np.where((shifted == EOS) | (targets == PAD), PAD, shifted).astype(np.int32)


def pack(batch: Batch, members: list[list[int]], width: int) -> Batch:
    """Rows of several pairs each; `width` slots on both sides."""
    shape = (len(members), width)
    arrays = {name: np.full(shape, PAD, np.int32) for name in Batch._fields}
    for row, pairs in enumerate(members):
        ends = {"source": 0, "target": 0}
        for number, pair in enumerate(pairs, start=1):
            for side in ends:
                kept = (batch.source if side == "source" else batch.target_out)[pair] != PAD
                slots = slice(ends[side], ends[side] + kept.sum())
                for name in ("source",) if side == "source" else ("target_in", "target_out"):
                    arrays[name][row, slots] = getattr(batch, name)[pair][kept]
                arrays[f"{side}_segments"][row, slots] = number
                arrays[f"{side}_positions"][row, slots] = np.arange(kept.sum())
                ends[side] = slots.stop
    return Batch(**arrays)


@cache
def build(
    config: ModelConfig, source: int = VOCABULARY, target: int = VOCABULARY
) -> tuple[Model, Params]:
    """A model and parameters none of which is 0 or 1, so that every term affects the output."""
    model = make_model(config, source, target)
    return model, random_params(model)


@cache
def forward(config: ModelConfig) -> Callable[..., Any]:
    """The compiled model: (batch, key=None, params=those of `build`) -> logits, weights."""
    model, built = build(config)
    apply: Any = jax.jit(model.apply)

    def run(
        batch: Batch, key: Any = None, params: Params = built
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        output = apply({"params": params}, batch, key)
        return output.logits, output.weights

    return run


def assert_packed_is_unpacked(config: ModelConfig, batch: Batch, atol: float) -> None:
    """The logits of four pairs are the same in two rows of two."""
    run = forward(config)
    (apart, _), members = run(batch), [[2, 0], [3, 1]]
    packed = pack(batch, members, 18)  # longer than max_length: positions start anew
    together, _ = run(packed)
    segments = np.asarray(packed.target_segments)
    for row, pairs in enumerate(members):
        for number, pair in enumerate(pairs, start=1):
            wanted = apart[pair][batch.target_out[pair] != PAD]
            logits = together[row][segments[row] == number]
            np.testing.assert_allclose(logits, wanted, rtol=0, atol=atol)


def assert_steps_are_teacher_forcing(
    config: ModelConfig, beams: int, atol: float, kernel: Any = "auto"
) -> dict[str, jax.Array]:
    """Step by step each of `beams` hypotheses, with its own target, has the logits that reading the
    whole target gives. Returns the weights [T, B, N, K, S] of each layer."""
    model, params = build(config)
    model = model.clone(kernel=kernel)
    batches = [make_batch(LENGTHS, seed=0)]
    batches += [make_batch([(7, 6)] * 4, seed=seed) for seed in range(1, beams)]
    source = batches[0].source
    targets = np.stack([b.target_in for b in batches], axis=1)  # [B, K, T]
    forced = [forward(config)(b._replace(source=source))[0] for b in batches]

    logits, weights = decode_steps(model, params, source, targets, 3)
    wanted = np.stack(forced, axis=1)
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=atol)
    return weights


@cache
def gradient(config: ModelConfig) -> Callable[[Batch], Any]:
    """The compiled gradient: batch -> (sum of losses, tokens), gradient of the sum."""
    model, params = build(config)
    grad = jax.jit(jax.value_and_grad(loss_of(model), has_aux=True))

    def run(batch: Batch) -> Any:
        (total, sums), gradient = grad(params, batch, None, {})
        return (total, sums.tokens), gradient

    return run


def assert_learns(config: ModelConfig, spared: Callable[[str], bool] = lambda _: False) -> None:
    """The loss counts the 13 tokens of LENGTHS. Each parameter has a finite gradient, which is not
    0 but for those that are `spared`."""
    (total, count), grads = gradient(config)(make_batch(LENGTHS))
    assert jnp.isfinite(total)
    assert count == 13
    for name, leaf in flat(grads).items():
        assert np.isfinite(leaf).all(), name
        # A bias on keys moves all of a query's scores alike: no gradient but rounding.
        assert np.any(leaf) or name.endswith("key/bias") or spared(name), name


def loss_of(model: Model, smoothing: float = 0.1) -> LossFn:
    """The loss that training uses, of `model`."""

    def loss(params: Params, batch: Batch, key: Any, _: Averages) -> tuple[jax.Array, LossSums]:
        output: Any = model.apply({"params": params}, batch, key)
        total, tokens = token_loss(output.logits, jnp.asarray(batch.target_out), smoothing)
        return total, LossSums(tokens, {})

    return loss


def flat(tree: Any, sep: str = "/") -> dict[str, Any]:
    """The leaves of a tree of dicts by "path/to/leaf"."""
    return dict(flatten_dict(tree, sep=sep))


def assert_gradients_close(actual: Params, wanted: Params, tolerance: float) -> float:
    """Each leaf's error is at most `tolerance` of its norm, or of 1/1000 of the whole's norm.

    Returns the largest error so measured.
    """
    errors = gradient_errors(actual, wanted)
    worst = max(jax.tree.leaves(errors))
    assert worst <= tolerance, errors
    return worst


def sentence_weights(
    source: list[str], target: list[str], layers: int = 1, heads: int = 2
) -> SentenceWeights:
    """Returns random attention weights of a pair of these tokens."""
    draw = np.random.default_rng(0)

    def weights(queries: list[str], keys: list[str]) -> dict[int, np.ndarray]:
        return {i: draw.dirichlet(np.ones(len(keys)), (heads, len(queries))) for i in range(layers)}

    sides = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}
    of_layers = {name: weights(*side) for name, side in sides.items()}
    return SentenceWeights(source, ["<s>", *target[:-1]], target, of_layers)


WORDS = {"red": "rot", "green": "grün", "blue": "blau"}
WORDS |= {"small": "klein", "old": "alt", "new": "neu"}


def write_pairs(folder: Path, name: str, count: int, seed: int) -> str:
    """Two files of colors and their German words in reverse; returns the corpus' name."""
    rng = random.Random(seed)
    rows = [rng.choices(list(WORDS), k=rng.randint(2, 6)) for _ in range(count)]
    source, target = folder / f"{name}.en", folder / f"{name}.de"
    source.write_text("".join(" ".join(row) + "\n" for row in rows), "utf-8")
    target.write_text(
        "".join(" ".join(WORDS[w] for w in row[::-1]) + "\n" for row in rows), "utf-8"
    )
    return f"{source},{target}"


def reversing_config(folder: Path) -> Config:
    """Words in reverse, from text files in `folder`: 12 steps with every kind of dropout on."""
    return Config(
        model=tiny(d_ff=32, max_length=32, dropout=0.1, attention_dropout=0.1, ffn_dropout=0.1),
        tokenizer=TokenizerConfig(vocabulary=320, sampling=0.1),
        data=DataConfig(
            train=(write_pairs(folder, "train", 150, 1),),
            dev=(write_pairs(folder, "dev", 20, 2),),
            batch_tokens=256,
            shapes=1,
            cache=str(folder / "cache"),
        ),
        optimizer=OptimizerConfig(schedule="inverse_sqrt", learning_rate=0.01, warmup=5, ema=0.9),
        train=TrainConfig(steps=12, evaluate_every=6, save_every=4, log_every=2),
    )


changed = Config.changed


def error_line(arguments: list[str], capsys: Capture) -> str:
    """The one line on standard error in which a command ends, with status 2."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert len(lines) == 1, shown.err
    assert lines[0].startswith("transformer-jax: error: ")
    return lines[0]


def printed(arguments: list[str], capsys: Capture) -> str:
    """What a command prints on standard output."""
    main(arguments)
    return capsys.readouterr().out


def json_lines(arguments: list[str], capsys: Capture) -> list[Any]:
    """The values that a command prints as JSON, one on each line."""
    return [json.loads(line) for line in printed(arguments, capsys).splitlines()]


def normalized(tokenizer: Tokenizer, text: str) -> str:
    """The text as the model normalizes it, on one line: what encoding and decoding leave of it."""
    processor = SentencePieceProcessor(model_proto=tokenizer.model)
    line = processor.normalize(text.replace("\0", "")).replace("▁", " ")
    breaks = {c for c in line if unicodedata.category(c) in ("Cc", "Zl", "Zp")}
    return "".join(" " if c in breaks else c for c in line).strip()


def never(ranks: jax.Array, bound: jax.Array) -> jax.Array:
    """The `Stop` of a beam search that goes on up to the greatest length."""
    del bound
    return jnp.zeros(ranks.shape[0], bool)


def translations(fixtures: Path) -> list[list[str]]:
    """Source, greedy translation, and translation with four beams, of the run in `fixtures`."""
    text = (fixtures / "run_translations.tsv").read_text("utf-8")
    return [line.split("\t") for line in text.splitlines()]


def wait_for(path: Path, process: subprocess.Popen[Any]) -> None:
    """Waits until a file or a folder is there, at most ten minutes."""
    end = time.monotonic() + 600
    while not path.exists():
        if time.monotonic() > end:
            process.kill()
        assert process.poll() is None, finish(process)[1]
        time.sleep(0.02)
