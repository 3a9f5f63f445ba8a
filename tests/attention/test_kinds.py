"""Every kind of attention in the model: what it sees, decoding by steps, packing, refusals."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import (
    LENGTHS,
    VOCABULARY,
    assert_gradients_close,
    assert_learns,
    assert_packed_is_unpacked,
    assert_steps_are_teacher_forcing,
    build,
    forward,
    gradient,
    make_batch,
    tiny,
    with_rare,
)
from jax.tree_util import Partial

from transformer_jax.attention import (
    AttentionInputs,
    AttentionOutput,
    Context,
    Mask,
    attend,
    functional,
    kinds,
    register_kind,
    scores,
)
from transformer_jax.attention.blockwise import Blocks, blockwise
from transformer_jax.attention.kinds import Kind
from transformer_jax.attention.multi_head import MultiHeadAttention
from transformer_jax.attention.scores import SCORES
from transformer_jax.config import AttentionConfig, ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.models.make import check_model, check_packing, make_model
from transformer_jax.special_ids import PAD
from transformer_jax.training.step import loss_fn
from transformer_jax.types import Batch, Outcome

pytestmark = pytest.mark.usefixtures("strict")

PLACES = ("encoder_attention", "decoder_attention", "cross_attention")


def everywhere(*places: str, **attention: Any) -> dict[str, Any]:
    chosen = AttentionConfig(**attention)
    return dict.fromkeys(places or PLACES, chosen)


encoder, decoder, cross = (partial(everywhere, place) for place in PLACES)
KINDS: dict[str, dict[str, Any]] = {
    "soft": {},
    "dot": everywhere(score="dot"),
    "general": everywhere(score="general"),
    "additive": everywhere(score="additive"),
    "location": everywhere(score="location"),
    "local-m": everywhere(kind="local-m", window=1),
    "local-m, additive": everywhere(kind="local-m", window=2, score="additive"),
    "local-p": everywhere("encoder_attention", "cross_attention", kind="local-p", window=2),
    "hard": everywhere("cross_attention", kind="hard", layer=0),
    "gumbel": everywhere(kind="gumbel"),
    "latent": everywhere("cross_attention", kind="latent"),
    "plain": everywhere("encoder_attention", "decoder_attention", kind="plain"),
    "plain in one layer": {"layers": 2, "heads": 4, "kv_heads": 2} | decoder(kind="plain", layer=1),
    "rotary": {"positions": "rotary"},
    "alibi": {"positions": "alibi"},
    "relative": {"positions": "relative"},
    "grouped": {"heads": 4, "kv_heads": 2, "positions": "rotary"},
    "one key head": {"heads": 4, "kv_heads": 1} | everywhere(kind="local-m", window=2),
    "grouped, additive": {"heads": 4, "kv_heads": 2} | everywhere(score="additive"),
}


RARE = ("dot", "general", "location", "local-m, additive", "plain in one layer", "rotary", "alibi")
RARE += ("gumbel", "one key head", "grouped, additive")
"""What differs little from another kind is tried by `make test-slow`."""


@pytest.fixture(params=with_rare(KINDS, RARE))
def kind(request: pytest.FixtureRequest) -> ModelConfig:
    return tiny(**KINDS[request.param])


def test_kinds_learn_all_that_they_hold(kind: ModelConfig) -> None:
    def spared(name: str) -> bool:
        hard = kind.cross_attention.kind == "hard" and "cross_attention" in name
        return ("key/" in name and ("location" in str(kind) or hard)) or ("query/" in name and hard)

    assert_learns(kind, spared)


def test_no_position_sees_what_follows_it_or_padding(kind: ModelConfig) -> None:
    """Each output depends on the source and on ids that are not after it."""
    run, batch = forward(kind), make_batch(LENGTHS)
    logits, _ = run(batch)

    def changed(changed_batch: Batch, params: Any) -> np.ndarray:
        """Where the outputs of ids, without padding, change [B, T]."""
        others, _ = run(changed_batch, params=params)
        return np.any((others != logits)[:, :, PAD + 1 :], axis=-1)

    _, params = build(kind)
    for position in range(6):  # the first sentence has six words
        ids = batch.target_in.copy()
        ids[0, position] = 3 + ids[0, position] % 2
        sees = changed(batch._replace(target_in=ids), params)[0]
        assert not sees[:position].any()
        assert sees[position:].all() if kind == tiny() else sees[position:].any()
    source = np.where(batch.source == PAD, PAD, 3 + batch.source % 2)
    assert changed(batch._replace(source=source), params)[0].any()

    def padding_changed(path: Any, leaf: jax.Array) -> jax.Array:
        named = jax.tree_util.keystr(path, simple=True, separator="/")
        return leaf.at[PAD].add(1.0) if named.endswith("embedding/embedding") else leaf

    real = batch.target_out != PAD
    other = jax.tree_util.tree_map_with_path(padding_changed, params)
    assert not changed(batch, other)[real].any()


def test_padding_changes_nothing(kind: ModelConfig) -> None:
    run, narrow = forward(kind), make_batch(LENGTHS)
    wide = Batch(*(np.pad(x, [(0, 0), (0, 5)]) for x in narrow[:3]))
    (logits, _), (padded, _) = run(narrow), run(wide)
    real = narrow.target_out != PAD
    np.testing.assert_allclose(padded[:, :6][real], logits[real], rtol=0, atol=5e-6)


def test_packed_is_unpacked(kind: ModelConfig) -> None:
    assert_packed_is_unpacked(kind, make_batch(LENGTHS), 5e-6)


def test_steps_are_teacher_forcing(kind: ModelConfig) -> None:
    assert_steps_are_teacher_forcing(kind, 2, 1e-5)


def test_steps_with_small_blocks_are_teacher_forcing() -> None:
    """Blocks that are out of reach of a window are skipped, of the right queries."""
    local = tiny(**everywhere(kind="local-m", window=1))

    def small_blocks(query: Any, key: Any, value: Any, mask: Mask, **_: Any) -> Any:
        return blockwise(query, key, value, mask, blocks=Blocks(1, 2, 2))

    assert_steps_are_teacher_forcing(local, 1, 1e-5, small_blocks)


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "MIN_GATHERED_KEYS", 0)
    monkeypatch.setattr(kinds, "MIN_WINDOWS", 0)


def gathering(**more: Any) -> ModelConfig:
    """A model whose size no other test uses, so that no compiled function is shared with them."""
    local = everywhere("encoder_attention", "cross_attention", kind="local-p", window=1, **more)
    return tiny(**local, heads=4, kv_heads=2, d_ff=20)


@pytest.mark.usefixtures("gathered")
@pytest.mark.parametrize("score", with_rare(("additive", "location", "general"), RARE))
def test_gathered_windows_are_those_of_all_scores(score: str) -> None:
    kind = gathering(score=score)
    model, params = build(kind)
    batch = Batch(*map(jnp.asarray, make_batch(LENGTHS)[:3]))

    def loss(params: Any, kernel: str) -> Any:
        output: Any = model.clone(kernel=kernel).apply({"params": params}, batch)
        return jnp.sum(jnp.sin(output.logits)), (output.logits, output.weights)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnames="kernel")
    (_, (logits, none)), grads = run(params, kernel="auto")
    (_, (wanted, weights)), wanted_grads = run(params, kernel="reference")
    assert "encoder/0/self_attention" in weights
    assert "encoder/0/self_attention" not in none
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=5e-6)
    assert_gradients_close(grads, wanted_grads, 1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("gathered")
def test_gathered_windows_with_padding_packing_and_steps() -> None:
    kind = gathering()
    test_padding_changes_nothing(kind)
    assert_packed_is_unpacked(kind, make_batch(LENGTHS), 5e-6)
    assert_steps_are_teacher_forcing(kind, 2, 1e-5)


@pytest.mark.slow
def test_hard_attention_learns_by_its_reward() -> None:
    """No gradient passes through its choices, but the scores have one. The reward is reported."""
    config = tiny(layers=2, **everywhere("cross_attention", kind="hard", layer=0))
    model, params = build(config)
    batch = Batch(*map(jnp.asarray, make_batch([(7, 6)] * 2)[:3]))
    averages = {"log_likelihood": jnp.asarray(-2.0)}
    loss = loss_fn(model, 0.0)

    @jax.jit
    def grad(key: jax.Array) -> Any:
        return jax.value_and_grad(loss, has_aux=True)(params, batch, key, averages)

    (total, (count, means)), grads = grad(jax.random.key(0))
    # The surrogate adds no loss.
    np.testing.assert_allclose(total, -means["log_likelihood"].total, rtol=1e-6)
    assert count == 12
    query = grads["decoder"]["layers_0"]["cross_attention"]["query"]["kernel"]
    assert np.any(query)
    _, weights = forward(config)(batch)
    picks, others = (weights[f"decoder/{i}/cross_attention"] for i in range(2))
    assert np.isin(picks, (0.0, 1.0)).all()
    assert not np.isin(others, (0.0, 1.0)).all()  # the other layers are soft
    (_, other), _ = grad(jax.random.key(1))
    log_likelihood = other.metrics["log_likelihood"].total
    assert log_likelihood != means["log_likelihood"].total  # other choices


def test_what_a_kind_reports_reaches_the_loss() -> None:
    """Its losses are added, and its metrics are means over the tokens of its queries."""

    def penalty(scale: jax.Array, outcome: Outcome) -> jax.Array:
        return scale * jnp.sum(outcome.is_token.astype(jnp.float32))

    def reporting(inputs: AttentionInputs) -> AttentionOutput:
        context, weights = inputs.attend(inputs.query, inputs.key, inputs.value, inputs.mask)
        index = jnp.arange(inputs.query.shape[2], dtype=jnp.float32)
        metric = jnp.broadcast_to(index, (inputs.query.shape[0], len(index)))
        losses = {"penalty": Partial(penalty, jnp.asarray(0.5))}
        return AttentionOutput(context, weights, losses, {"index": metric})

    register_kind("reporting", reporting)
    places = everywhere("encoder_attention", "cross_attention", kind="reporting")
    model, params = build(tiny(**places))
    plain, _ = build(tiny())
    batch = Batch(*map(jnp.asarray, make_batch([(7, 6), (3, 2)])[:3]))
    averages = {"log_likelihood": jnp.asarray(0.0)}
    total, sums = jax.jit(loss_fn(model, 0.1))(params, batch, None, averages)
    wanted, _ = jax.jit(loss_fn(plain, 0.1))(params, batch, None, {})
    np.testing.assert_allclose(total, wanted + 2 * 0.5 * 8, rtol=1e-6)
    assert sums.metrics["encoder/0/self_attention/index"] == (21 + 3, 10)
    assert sums.metrics["decoder/0/cross_attention/index"] == (15 + 1, 8)


@pytest.mark.slow
def test_weight_of_rewards() -> None:
    """It scales the gradient of REINFORCE, and does not change that of the loss itself."""
    averages, batch = {"log_likelihood": jnp.asarray(-2.0)}, make_batch([(7, 6)] * 2)[:3]

    def taught(reward: float) -> Any:
        hard = everywhere("cross_attention", kind="hard", layer=0, entropy=0.0, reward=reward)
        model, params = build(tiny(**hard))
        loss = jax.jit(jax.grad(loss_fn(model, 0.0), has_aux=True))
        grads = loss(params, Batch(*map(jnp.asarray, batch)), jax.random.key(0), averages)[0]
        return grads["decoder"]["layers_0"]["cross_attention"]

    light, heavy = taught(0.25), taught(1.0)
    query = light["query"]["kernel"]
    assert np.any(query)
    np.testing.assert_allclose(heavy["query"]["kernel"], 4 * query, rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(heavy["value"]["kernel"], light["value"]["kernel"])


def cosine(inputs: AttentionInputs) -> AttentionOutput:
    """A kind of one's own: softmax of scaled cosines."""

    def unit(x: jax.Array) -> jax.Array:
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    five, heads = jax.nn.initializers.constant(5.0), inputs.query.shape[1]
    scale = inputs.param("scale", five, (1, heads, 1, 1))
    query = unit(inputs.query) * scale
    return AttentionOutput(*inputs.attend(query, unit(inputs.key), inputs.value, inputs.mask))


@pytest.mark.parametrize("wrong", ["tuple", "width"])
def test_a_kind_that_returns_something_else(wrong: str) -> None:
    def kind(inputs: AttentionInputs) -> Any:
        context = inputs.query[..., :3]
        return (context, None) if wrong == "tuple" else AttentionOutput(context, None)

    register_kind(f"wrong {wrong}", kind)
    config = tiny(**everywhere("cross_attention", kind=f"wrong {wrong}"))
    model = make_model(config, VOCABULARY, VOCABULARY)
    with pytest.raises(ValueError, match=r"must return .* with a context of \(4, 2, 6, 8"):
        jax.eval_shape(model.init, jax.random.key(0), make_batch(LENGTHS))


def test_a_kind_of_ones_own() -> None:
    register_kind("cosine", cosine)
    register_kind("cosine", cosine)
    config = tiny(**everywhere("cross_attention", kind="cosine"))
    (_, _), grads = gradient(config)(make_batch(LENGTHS))
    assert np.any(grads["decoder"]["layers_0"]["cross_attention"]["scale"])
    with pytest.raises(ValueError, match="kind 'cosine': is already the label of another"):
        register_kind("cosine", kinds.soft)
    unknown = tiny(**everywhere("cross_attention", kind="cosinus"))
    said = r"kind='cosinus': .* mean cosine\?; one .* --import MODULE"
    with pytest.raises(ValueError, match=said):
        forward(unknown)(make_batch(LENGTHS))


DROPOUT = {"attention_dropout": 0.1}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (r"attention_dropout=0\.1: must be 0 .* score additive", DROPOUT | cross(score="additive")),
    (r"attention_dropout=0\.1: must be 0 .* kind gumbel", DROPOUT | cross(kind="gumbel")),
    (r"score='dot': must be left out for plain", encoder(kind="plain", score="dot")),
    (r"positions='rotary': .* kind plain", {"positions": "rotary"} | encoder(kind="plain")),
    (r"model\.kv_heads=3: must be a divisor of model\.heads=4", {"heads": 4, "kv_heads": 3}),
    (r"window=0: must be at least 1", encoder(kind="local-m", window=0)),
    (r"encoder_attention\.window=None: must be at least 1", encoder(kind="local-m")),
    (r"window=3: must be left out for the kind soft", cross(window=3)),
    (r"kind='local-p': must be another kind, since a s", decoder(kind="local-p", window=3)),
    (r"encoder_attention\.kind='hard': must be another", encoder(kind="hard")),
    (r"cross_attention\.kind='plain': must be another", cross(kind="plain")),
    (r"cross_attention\.layer=None: must be named \(0 to 0\)", cross(kind="hard")),
    (r"cross_attention\.layer=4: must be from 0 to 0", cross(kind="hard", layer=4)),
    (r"cross_attention\.entropy=-1\.0: must be", cross(entropy=-1.0)),
    (r"cross_attention\.reward=0\.0: must be above 0", cross(reward=0.0)),
    (r"d_model=18: must be an even", {"d_model": 18, "heads": 2, "positions": "rotary"}),
]


@pytest.mark.parametrize(("message", "changes"), REFUSED, ids=range(len(REFUSED)))
def test_what_makes_no_sense_is_refused(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=message):
        check_model(tiny(**changes))


def test_hard_attention_is_refused_with_packing() -> None:
    model = tiny(**everywhere("cross_attention", kind="hard", layer=0))
    with pytest.raises(ValueError, match=r"data\.packing=True: must be false where"):
        check_packing(model)


def test_a_kernel_that_cannot_do_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"execution\.kernel='xla': .*; use auto or reference"):
        check_model(tiny(attention_dropout=0.1), "xla")
    with pytest.raises(ValueError, match=r"'blockwise': .* model\.positions='alibi' needs; use"):
        check_model(tiny(positions="alibi"), "blockwise")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    check_model(tiny(dtype="bfloat16"), "cudnn")
    with pytest.raises(ValueError, match=r"kernel='cudnn': .*not float32; use xla"):
        check_model(tiny(), "cudnn")


def formula(inputs: AttentionInputs, params: dict[str, jax.Array], lengths: list[int]) -> Any:
    """The context by the pure functions, which test_functional.py compares with float64 loops."""
    config, query = inputs.config, inputs.query
    keys, values = (jnp.repeat(x, 2, axis=1) for x in (inputs.key, inputs.value))
    places, length = jnp.arange(keys.shape[2]), jnp.array(lengths)[:, None, None]
    mask = places < length[..., None]
    more: dict[str, Any] = {} if config.window is None else {"window": config.window}
    if config.kind == "local-p":
        learned = params["center_w"], params["center_v"]
        more["center"] = functional.predicted_center(query, length.astype(float), *learned)
    if config.kind == "latent":
        logits = keys @ params["active"][:, :, : len(places)]
        more["active"] = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf))

    def score(query: jax.Array, keys: jax.Array) -> jax.Array:
        if config.score == "location":
            return scores.location(query, places, params["positions"])
        learned = {name: params[name] for name in ("w", "u", "v") if name in params}
        return getattr(scores, config.score)(query, keys, **learned)

    attention = getattr(functional, f"{config.kind.replace('-', '_')}_attention")
    return attention(query, keys, values, mask, score=score, **more).context


@pytest.mark.parametrize(
    ("kind", "score"),
    [("soft", score) for score in SCORES]
    + [("local-m", "general"), ("local-p", "scaled_dot"), ("local-p", "additive")]
    + [("latent", "scaled_dot"), ("hard", "general"), ("gumbel", "dot")],
)
def test_kinds_of_layers_are_their_formulas(kind: str, score: Any) -> None:
    """With their parameters, four query heads that share two key heads, and a padded sentence."""
    params: dict[str, jax.Array] = {}

    def param(name: str, _: Any, shape: tuple[int, ...]) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(9), len(params))
        return params.setdefault(name, 0.5 * jax.random.normal(key, shape))

    query, key, value = (
        jax.random.normal(jax.random.key(i), (2, heads, length, 8))
        for i, (heads, length) in enumerate([(4, 5), (2, 7), (2, 7)])
    )
    lengths = [7, 5]
    window = 2 if kind.startswith("local") else None
    inputs = AttentionInputs(
        query=query,
        key=key,
        value=value,
        mask=Mask(key_segments=jnp.array([[1] * n + [0] * (7 - n) for n in lengths])),
        bias=None,
        config=AttentionConfig(kind=kind, score=score, window=window),
        max_length=9,
        rng=None,
        attend=partial(attend, kernel="auto"),
        needs_weights=False,
        last_layer=True,
        param=param,
    )
    context = kinds.find_kind("cross_attention", kind).compute(inputs).context
    with jax.numpy_rank_promotion("allow"):
        wanted = formula(inputs, params, lengths)
    np.testing.assert_allclose(context, wanted, atol=5e-6)


def test_a_plain_layer_is_plain_attention_in_each_head() -> None:
    config = tiny(**everywhere("encoder_attention", kind="plain"))
    layer = MultiHeadAttention(config, "encoder_attention")
    x = jax.random.normal(jax.random.key(0), (2, 5, 16))

    def attended(layer: MultiHeadAttention) -> Any:
        return layer(x, Context(Mask()))[0]

    output = np.asarray(layer.apply({}, method=attended))
    for head in (slice(0, 8), slice(8, 16)):
        wanted = functional.plain_self_attention(x[..., head]).context
        np.testing.assert_allclose(output[..., head], wanted, atol=5e-6)


def test_a_kind_of_ones_own_may_say_what_it_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Kind(cosine, dropout=False, packing=False, kernel_features=frozenset({"window"}))
    register_kind("declared", kind)
    config = tiny(**everywhere("cross_attention", kind="declared"))
    check_model(config)
    with pytest.raises(UserError, match=r"attention_dropout=0\.1: must be 0 .* kind declared"):
        check_model(replace(config, attention_dropout=0.1))
    with pytest.raises(UserError, match=r"must be false where model\.cross_attention\.kind"):
        check_packing(config)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(UserError, match=r"'pallas': .*cross_attention\.kind='declared' needs"):
        check_model(config, "pallas")
