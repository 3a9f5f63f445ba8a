"""The classifier: each label by a query of its own, over embeddings or the encoder's output."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import LENGTHS, VOCABULARY, WORDS, assert_learns, build, flat, forward, make_batch, tiny

from transformer_jax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    TokenizerConfig,
    TrainConfig,
)
from transformer_jax.decoding.attention_weights import attention_weights, choose_view
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.strategies import Lines, make_search
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.models.classifier import Classifier
from transformer_jax.models.make import check_model, check_packing, count_parameters, make_model
from transformer_jax.special_ids import EOS
from transformer_jax.training.oracles import decode_steps
from transformer_jax.training.setup import prepare
from transformer_jax.training.trainer import train
from transformer_jax.types import Batch

LABELS = 5


def labeling(kind: str = "soft", **changes: Any) -> ModelConfig:
    layer = 0 if kind == "hard" else None
    attention = AttentionConfig(kind=kind, layer=layer)
    plain = {"labels": LABELS, "layers": 0, "tied": "none", "cross_attention": attention}
    return tiny(**(plain | changes))


VARIANTS = {
    "soft": labeling(),
    "latent": labeling("latent", positions="learned", output_bias=True),
    "hard": labeling("hard"),
    "latent on the encoder": labeling("latent", layers=1, norm="pre", positions="relative"),
}


@pytest.fixture(params=VARIANTS.values(), ids=list(VARIANTS))
def variant(request: pytest.FixtureRequest, strict: None) -> ModelConfig:
    return request.param


def test_it_learns_all_that_it_holds(variant: ModelConfig) -> None:
    assert isinstance(make_model(variant, VOCABULARY, VOCABULARY), Classifier)
    _, params = build(variant)
    sizes = [leaf.size for leaf in flat(params).values()]
    assert count_parameters(variant, VOCABULARY, VOCABULARY) == sum(sizes)
    hard = variant.cross_attention.kind == "hard"
    assert_learns(variant, lambda name: hard and ("/query" in name or "/key" in name))


def test_latent_weights_are_the_formula_of_the_paper() -> None:
    """l = softmax(uᵀE), A = softmax(VᵀE) over positions, w = A l: in float64."""
    config = labeling("latent", positions="learned", heads=1, bias=False)
    _, params = build(config)
    batch = make_batch(LENGTHS)
    _, weights = forward(config)(batch)
    exact = {name: np.asarray(leaf, np.float64) for name, leaf in flat(params).items()}

    def softmax(scores: np.ndarray) -> np.ndarray:
        e = np.exp(scores - scores.max())
        return e / e.sum()

    u = exact["queries"] @ exact["cross_attention/query/kernel"][:, 0] / config.d_model**0.5
    for number, (row, (length, _)) in enumerate(zip(batch.source, LENGTHS, strict=True)):
        table, places = (exact[f"source_embedding/{part}"] for part in ("embedding", "positions"))
        e = table[row[:length]] * config.d_model**0.5 + places[:length]
        e = e @ exact["cross_attention/key/kernel"][:, 0]
        v = exact["cross_attention/active"][0]
        active = [softmax((token @ v)[:length]) for token in e]
        wanted = [softmax(e @ label) @ np.stack(active) for label in u]
        of_labels = weights["labels/cross_attention"][number, 0]
        np.testing.assert_allclose(of_labels[:, :length], wanted, atol=2e-6)
        assert not of_labels[:, length:].any()


def test_each_label_is_independent(variant: ModelConfig) -> None:
    """A label's logits depend on its own query, on no other's and on no target."""
    model, params = build(variant)
    batch = Batch(*map(jnp.asarray, make_batch(LENGTHS)[:3]))

    def of_queries(queries: jax.Array) -> jax.Array:
        return jnp.sum(model.apply({"params": params | {"queries": queries}}, batch)[0], (0, 2))

    moved = np.abs(jax.jit(jax.jacrev(of_queries))(params["queries"])).sum(-1) > 0
    np.testing.assert_array_equal(moved, np.eye(LABELS + 1, dtype=bool))
    logits, _ = forward(variant)(batch)
    other, _ = forward(variant)(batch._replace(target_in=batch.target_in[::-1]))
    np.testing.assert_array_equal(logits, other)
    fewer, _ = forward(variant)(Batch(*(x[:, :2] if i else x for i, x in enumerate(batch[:3]))))
    np.testing.assert_allclose(fewer, logits[:, :2], rtol=0, atol=1e-6)


def test_no_label_sees_padding(variant: ModelConfig) -> None:
    model, params = build(variant)
    narrow = Batch(*map(jnp.asarray, make_batch(LENGTHS)[:3]))

    def of_table(table: jax.Array) -> jax.Array:
        changed = params | {"source_embedding": params["source_embedding"] | {"embedding": table}}
        return jnp.sum(model.apply({"params": changed}, narrow)[0] ** 2)

    of_ids = np.abs(jax.jit(jax.grad(of_table))(params["source_embedding"]["embedding"])).sum(-1)
    assert not of_ids[0].any()
    assert of_ids.any()
    wide = narrow._replace(source=jnp.pad(narrow.source, [(0, 0), (0, 5)]))
    (logits, _), (padded, _) = forward(variant)(narrow), forward(variant)(wide)
    np.testing.assert_allclose(padded, logits, rtol=0, atol=5e-6)


def test_steps_are_teacher_forcing(variant: ModelConfig) -> None:
    """Logits ignore earlier ids; after the last label they are those of the end symbol."""
    (model, params), batch = build(variant), make_batch(LENGTHS)
    logits, _ = forward(variant)(batch)
    ids = np.broadcast_to(np.arange(LABELS + 3, dtype=np.int32), (4, 2, LABELS + 3))
    stepwise, _ = decode_steps(model, params, batch.source, ids, 3)
    wanted = np.take(logits, [0, 1, 2, 3, 4, 5, 5, 5], axis=1)
    for beam in (0, 1):
        np.testing.assert_allclose(stepwise[:, beam], wanted, rtol=0, atol=1e-6)


def test_search_takes_the_likeliest_label_at_each_position() -> None:
    model, params = build(labeling("latent"))
    output = params["output"].at[EOS].set(9 * params["queries"][3])  # likely at the fourth position
    params = params | {"output": output}
    batch = Batch(*map(jnp.asarray, make_batch([(n, 6) for n in range(1, 8)] * 4, seed=3)[:3]))
    logits = jax.jit(model.apply)({"params": params}, batch)[0]
    search = jax.jit(make_search([model], DecodeConfig(beam=1)))
    ids = search([params], Lines(batch.source)).ids[:, 0, : LABELS + 1]
    wanted = np.asarray(logits)[..., 1:].argmax(-1) + 1
    ends = wanted == EOS
    assert ends[:, :-1].any()
    np.testing.assert_array_equal(ids, np.where(ends.cumsum(axis=1) > ends, 0, wanted))


def test_without_positions_a_soft_classifier_reads_a_bag_of_words() -> None:
    source = jnp.asarray([[3, 4, 5, 6, 2], [6, 4, 2, 5, 3]])
    for positions, same in (("none", True), ("learned", False)):
        batch = Batch(source, jnp.ones_like(source[:, :2]), source[:, :2])
        logits, _ = forward(labeling(positions=positions))(batch)
        assert np.allclose(logits[0], logits[1], atol=1e-6) == same


def labels_of(sentence: list[str]) -> str:
    return f"{WORDS[sentence[0]]} {WORDS[sentence[-1]]}"


def corpus_file(path: Path, labels: str = "") -> Config:
    """Colors with the German words for the first and the last one as labels."""
    rows = [[a, b, c] for a in WORDS for b in WORDS for c in WORDS]
    path.write_text("".join(f"{' '.join(r)}\t{labels_of(r)}{labels}\n" for r in rows), "utf-8")
    return Config(
        model=replace(labeling("latent", positions="learned"), labels=2),
        tokenizer=TokenizerConfig(kind="word", joint=False),
        data=DataConfig(train=(str(path),), dev=(str(path),), batch_tokens=256, shapes=1),
        train=TrainConfig(steps=4, evaluate_every=4, save_every=4),
        decode=DecodeConfig(beam=2),
    )


@pytest.mark.long
def test_the_loop_trains_it(tmp_path: Path) -> None:
    config = corpus_file(tmp_path / "colors.tsv")
    trained = train(config, tmp_path / "run")
    outputs = Translator.load(trained.folder)(["red old new", "", "blue purple"])
    assert outputs[1] == ""
    assert all({*output.split()} <= {*WORDS.values()} for output in outputs), outputs


def test_pairs_are_scored_and_their_attention_is_shown(tmp_path: Path) -> None:
    """The classifier has fewer labels than the narrowest batch has columns."""
    config = corpus_file(tmp_path / "colors.tsv")
    setup = prepare(config)
    _, params = build(config.model, *setup.tokenizers.sizes)
    translator = Translator(config, setup.tokenizers, params, heads=[(0, None)])
    (output,) = translator(["red old new"])
    best = output.hypotheses[0]
    assert len(best.ids) <= 3
    scorer = Scorer(translator, [(0, 1)])
    (score,) = scorer.of_ids([(translator.encode(output.source), best.ids)])
    np.testing.assert_allclose(score.log_prob, best.log_prob, atol=1e-4)
    assert score.attention is not None
    shown = attention_weights(translator, "red old new", "rot neu")
    assert choose_view(shown).attention == "cross"
    assert shown.layers["cross"][0].shape == (2, 3, 4)
    (pair,) = scorer(["red old new"], ["rot neu"])
    assert pair.attention is not None
    np.testing.assert_allclose(pair.attention, shown.layers["cross"][0][1], atol=1e-6)
    (many,) = scorer(["red"], ["rot neu alt"])
    assert many.reason == "its target has 3 tokens; must be at most 2"


def test_more_labels_than_the_model_has_are_refused(tmp_path: Path) -> None:
    said = r"model\.labels=2: must be at least 3, since there are targets of 4 tokens, end symbol"
    with pytest.raises(ValueError, match=said):
        prepare(corpus_file(tmp_path / "colors.tsv", labels=" rot"))
    model = make_model(replace(labeling(), labels=2), VOCABULARY, VOCABULARY)
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(model.init, jax.random.key(0), make_batch([(5, 4)], target=4))


DOT = AttentionConfig(score="dot")
LOCAL = AttentionConfig(kind="local-m", window=2)
ABOVE = AttentionConfig(kind="hard", layer=1)
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (r"model\.labels=0: must be above 0", {"labels": 0}),
    (r"model\.layers=0: must be above 0", {"labels": None}),
    (r"model\.layers=-1: must be at least 0", {"layers": -1}),
    (r"model\.tied='all': must be none where model\.labels is set", {"tied": "all"}),
    (r"model\.decoder_layers=1: must be left out where the model has no", {"decoder_layers": 1}),
    (r"model\.decoder_attention=.*: must be left out .* no decoder", {"decoder_attention": DOT}),
    (r"model\.encoder_attention=.*: must be left out .* no encoder", {"encoder_attention": DOT}),
    (r"model\.positions='alibi': must be .* where model\.layers=0", {"positions": "alibi"}),
    (r"kind='local-m': must be another kind, since labels", {"cross_attention": LOCAL}),
    (r"attention\.layer=1: must be from 0 to 0", {"cross_attention": ABOVE, "layers": 2}),
]


@pytest.mark.parametrize(("message", "changes"), REFUSED, ids=range(len(REFUSED)))
def test_what_makes_no_sense_is_refused(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=message):
        check_model(labeling(**changes))


def test_labels_are_refused_with_packing() -> None:
    with pytest.raises(ValueError, match=r"packing=True: must be false where model\.labels=5"):
        check_packing(labeling())
