"""Every kind of attention against its formula, written as loops over queries in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from jax.tree_util import Partial
from jaxtyping import Array

from transformer_jax.attention import (
    Mask,
    gathered,
    gumbel_attention,
    hard_attention,
    latent_attention,
    local_m_attention,
    local_p_attention,
    plain_self_attention,
    scores,
    soft_attention,
)
from transformer_jax.attention.functional import predicted_center
from transformer_jax.attention.gathered import local_p_gathered

pytestmark = pytest.mark.usefixtures("strict")

HEADS, QUERIES, KEYS, WIDTH, WINDOW = 2, 5, 7, 4, 2


def draw(seed: int, *shape: int) -> Array:
    return jax.random.normal(jax.random.key(seed), shape)


QUERY = draw(0, HEADS, QUERIES, WIDTH)
KEY, VALUE = draw(1, HEADS, KEYS, WIDTH), draw(2, HEADS, KEYS, WIDTH)
W, U, V = draw(3, HEADS, WIDTH, WIDTH), draw(4, HEADS, WIDTH, WIDTH), draw(5, HEADS, WIDTH)
PLACES = draw(6, HEADS, WIDTH, KEYS)
CENTER = jnp.asarray([[0.3, 1.5, 3.0, 5.2, 6.9], [6.1, 0.0, 2.2, 4.4, 1.0]])
MASK = jax.random.bernoulli(jax.random.key(7), 0.7, (QUERIES, KEYS)).at[1].set(False)
ACTIVE = jax.nn.softmax(draw(8, HEADS, KEYS, KEYS))


def exact(x: Array) -> np.ndarray:
    return np.asarray(x, np.float64)


SCORES: dict[str, tuple[Callable[..., Array], Callable[[Any, Any, int, int], float]]] = {
    "dot": (scores.dot, lambda q, k, n, s: q @ k),
    "scaled_dot": (scores.scaled_dot, lambda q, k, n, s: q @ k / np.sqrt(WIDTH)),
    "general": (partial(scores.general, w=W), lambda q, k, n, s: q @ exact(W)[n] @ k),
    "additive": (
        partial(scores.additive, w=W, u=U, v=V),
        lambda q, k, n, s: exact(V)[n] @ np.tanh(q @ exact(W)[n] + k @ exact(U)[n]),
    ),
    "location": (
        lambda query, keys: scores.location(query, jnp.arange(keys.shape[-2]), PLACES),
        lambda q, k, n, s: (q @ exact(PLACES)[n])[s],
    ),
}


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max()) if x.size else x
    return e / e.sum()


def weights_by_hand(
    score: Any, mask: np.ndarray, more: Callable[..., np.ndarray] | None = None
) -> np.ndarray:
    """Softmax over the unmasked keys, query by query; `more` changes the weights of a query."""
    weights = np.zeros((HEADS, QUERIES, KEYS))
    for n, t in np.ndindex(HEADS, QUERIES):
        seen = np.flatnonzero(mask[n, t])
        row = [score(exact(QUERY)[n, t], exact(KEY)[n, s], n, s) for s in seen]
        weights[n, t, seen] = softmax(np.array(row))
        if more is not None:
            weights[n, t] = more(weights[n, t], n, t)
    return weights


def whole_mask() -> np.ndarray:
    return np.broadcast_to(np.asarray(MASK), (HEADS, QUERIES, KEYS))


def near(center: np.ndarray) -> np.ndarray:
    return np.abs(np.arange(KEYS) - center[..., None]) <= WINDOW


def gaussian(weights: np.ndarray, n: int, t: int) -> np.ndarray:
    sigma = WINDOW / 2
    return weights * np.exp(-((np.arange(KEYS) - exact(CENTER)[n, t]) ** 2) / (2 * sigma**2))


def picked(weights: np.ndarray, n: int, t: int) -> np.ndarray:
    return np.eye(KEYS)[weights.argmax()] * weights.any()


OWN_POSITION = np.broadcast_to(np.arange(QUERIES), (HEADS, QUERIES))
KINDS: dict[str, tuple[Callable[..., Any], np.ndarray, Any]] = {
    "soft": (soft_attention, whole_mask(), None),
    "hard": (hard_attention, whole_mask(), picked),
    "gumbel": (gumbel_attention, whole_mask(), picked),
    "local-m": (partial(local_m_attention, window=WINDOW), whole_mask() & near(OWN_POSITION), None),
    "local-p": (
        partial(local_p_attention, center=CENTER, window=WINDOW),
        whole_mask() & near(exact(CENTER)),
        gaussian,
    ),
    "latent": (
        partial(latent_attention, active=ACTIVE),
        whole_mask(),
        lambda weights, n, t: weights @ exact(ACTIVE)[n],
    ),
}


EACH_ONCE = [(kind, "scaled_dot") for kind in KINDS] + [("soft", score) for score in SCORES]
"""No kind depends on the score."""


@pytest.mark.parametrize(("kind", "score"), EACH_ONCE)
def test_kinds_are_their_formulas(kind: str, score: str) -> None:
    attention, mask, more = KINDS[kind]
    ours, theirs = SCORES[score]
    context, weights = attention(QUERY, KEY, VALUE, MASK, score=ours)
    wanted = weights_by_hand(theirs, mask, more)
    np.testing.assert_allclose(weights, wanted, atol=2e-6)
    np.testing.assert_allclose(context, wanted @ exact(VALUE), atol=2e-6)
    assert not np.any(context[:, 1]), "a query without keys"


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_mask_all_keys_are_seen(kind: str) -> None:
    attention, _, _ = KINDS[kind]
    everywhere = jnp.ones((QUERIES, KEYS), bool)
    ours, wanted = attention(QUERY, KEY, VALUE), attention(QUERY, KEY, VALUE, everywhere)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), ours, wanted)


@pytest.mark.parametrize(
    ("kind", "score"), [each for each in EACH_ONCE if each[0] not in ("hard", "gumbel")]
)
def test_gradients_are_finite_differences(kind: str, score: str) -> None:
    attention, _, _ = KINDS[kind]

    def context(*arrays: Any) -> Array:
        return attention(*map(jnp.asarray, arrays), MASK, score=SCORES[score][0])[0]

    check_grads(context, (QUERY, KEY, VALUE), order=1, modes=["rev"], atol=1e-2, rtol=1e-2)


def test_gradients_of_what_kinds_learn_are_finite_differences() -> None:
    def by_score(*learned: Any) -> Array:
        w, u, v, places = map(jnp.asarray, learned)
        general = soft_attention(QUERY, KEY, VALUE, MASK, score=partial(scores.general, w=w))
        additive = partial(scores.additive, w=w, u=u, v=v)
        more = soft_attention(QUERY, KEY, VALUE, MASK, score=additive)
        where = partial(scores.location, key_positions=jnp.arange(KEYS), w=places)
        last = soft_attention(QUERY, KEY, VALUE, MASK, score=lambda query, _: where(query))
        return general[0] + more[0] + last[0]

    check_grads(by_score, (W, U, V, PLACES), order=1, modes=["rev"], atol=1e-2, rtol=1e-2)

    def by_center(*learned: Any) -> Array:
        lengths = jnp.full((HEADS, QUERIES), 7.0)
        center = predicted_center(QUERY, lengths, *map(jnp.asarray, learned))
        wide = {"center": center, "window": KEYS + 1}  # no edge of a window is crossed
        return local_p_attention(QUERY, KEY, VALUE, MASK, **wide)[0]

    check_grads(by_center, (W, V), order=1, modes=["rev"], atol=1e-2, rtol=1e-2)


SENTENCES = jnp.array([[0] * QUERIES, [0, 0, 3, 3, 3]]), jnp.array([[6] * QUERIES, [3, 3, 4, 4, 0]])
"""In two rows: where the sentence begins that each query looks at, and its length."""


@pytest.mark.parametrize("window", [1, 2, KEYS])
@pytest.mark.parametrize("score", ["scaled_dot", "additive"])
def test_gathered_windows_are_local_p_attention(
    score: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients agree, with many queries per chunk or one; `SENTENCES` are packed."""
    first, length = SENTENCES
    position = jnp.arange(KEYS)[None, None] - first[:, :, None]
    seen = (position >= 0) & (position < length[:, :, None])
    learned = {"w": W, "u": U, "v": V} if score == "additive" else {}

    def center_of(share: Array) -> Array:
        return share * length[:, None].astype(jnp.float32)

    def ours(share: Array, score: Partial, query: Array, keys: Array, values: Array) -> Array:
        options = {"center": center_of(share), "window": window, "score": score}
        return local_p_gathered(query, keys, values, first, length, **options)

    def wanted(share: Array, score: Partial, query: Array, keys: Array, values: Array) -> Array:
        options = {"center": center_of(share), "window": window, "score": score}
        options["key_positions"] = jnp.broadcast_to(position[:, None], (2, HEADS, QUERIES, KEYS))
        return local_p_attention(query, keys, values, seen[:, None], **options)[0]

    share = jnp.stack([CENTER / KEYS, jnp.array([[0.0, 1.0, 0.25, 0.5, 0.5], [1, 0.4, 0, 0.9, 1]])])
    arrays = [jnp.stack([x, x[::-1]]) for x in (QUERY, KEY, VALUE)]
    given = (share, Partial(getattr(scores, score), **learned), *arrays)
    gradient = draw(9, *arrays[0].shape)

    def computed(attention: Any) -> Any:
        @jax.jit
        def run(*given: Any) -> Any:
            context, back = jax.vjp(attention, *given)
            return context, jax.tree.leaves(back(gradient))

        return run(*given)

    exactly, leaves_exactly = computed(wanted)
    for elements in (gathered.CHUNK_ELEMENTS, 1):
        monkeypatch.setattr(gathered, "CHUNK_ELEMENTS", elements)
        context, leaves = computed(ours)
        np.testing.assert_allclose(context, exactly, atol=2e-6)
        assert not np.any(context[1, :, 4]), "an empty sentence"
        for a, b in zip(leaves, leaves_exactly, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)


def test_predicted_center_is_the_formula() -> None:
    lengths = np.array([[7, 6, 5, 4, 3]] * HEADS)
    center = predicted_center(QUERY, jnp.asarray(lengths, jnp.float32), W, V)
    for n, t in np.ndindex(HEADS, QUERIES):
        inner = exact(V)[n] @ np.tanh(exact(QUERY)[n, t] @ exact(W)[n])
        np.testing.assert_allclose(center[n, t], lengths[n, t] / (1 + np.exp(-inner)), rtol=1e-5)
    assert np.all((np.asarray(center) > 0) & (np.asarray(center) < lengths))


POSITIONS = jnp.array([[0, 3, 1, 1, 6, 2, 5], [0, 1, 2, 0, 1, 2, 3]])
"""The positions of the keys in two rows of a batch."""


@pytest.mark.parametrize("name", scores.SCORES)
def test_prepared_scores_are_the_formulas(name: str) -> None:
    """The parameters have the shapes in the table; two rows have different positions."""
    entry = scores.SCORES[name]
    sizes = {"H": WIDTH, "P": KEYS}
    params = {
        param: draw(10 + i, HEADS, *(sizes[letter] for letter in dimensions.split()))
        for i, (param, dimensions) in enumerate({**entry.params, **entry.compare_params}.items())
    }
    query, keys = (jnp.stack([x, x[::-1]]) for x in (QUERY, KEY))
    prepared = entry.prepare(query, keys, POSITIONS, **{n: params[n] for n in entry.params})
    compared = entry.compare(*prepared, **{n: params[n] for n in entry.compare_params})
    if name == "location":
        wanted = scores.location(query, POSITIONS[:, None], params["positions"])
    else:
        wanted = getattr(scores, name)(query, keys, **params)
    np.testing.assert_allclose(compared, wanted, atol=1e-5)
    assert not entry.product or prepared[1] is keys


@pytest.mark.parametrize("name", ["general", "additive", "location"])
def test_scores_compute_in_the_type_of_the_query(name: str) -> None:
    """Parameters are float32; products and tanh are in bfloat16, and the scores in float32."""
    low = [x.astype(jnp.bfloat16) for x in (QUERY, KEY)]

    def score(query: Array, keys: Array) -> Array:
        return SCORES[name][0](query, keys)

    assert score(*low).dtype == jnp.float32
    for equation in jax.make_jaxpr(score)(*low).eqns:
        if equation.primitive.name in ("dot_general", "tanh"):
            assert {x.aval.dtype.name for x in equation.invars} == {"bfloat16"}, equation


def test_plain_self_attention_is_softmax_of_products() -> None:
    context, weights = plain_self_attention(KEY)
    assert weights is not None
    for n in range(HEADS):
        x = exact(KEY)[n]
        wanted = np.stack([softmax(row) for row in x @ x.T])
        np.testing.assert_allclose(weights[n], wanted, atol=2e-6)
        np.testing.assert_allclose(context[n], wanted @ x, atol=1e-5)


@pytest.mark.parametrize("attention", [hard_attention, gumbel_attention])
def test_sampled_choices_follow_the_weights(attention: Any) -> None:
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = jax.vmap(lambda key: attention(QUERY, KEY, VALUE, MASK, key=key)[1])(keys)
    sees_any = np.broadcast_to(MASK.any(-1), drawn.shape[:-1])
    np.testing.assert_allclose(drawn.max(-1), sees_any, atol=1e-6)
    _, wanted = soft_attention(QUERY, KEY, VALUE, MASK)
    assert wanted is not None
    # Five standard deviations of a share of 4,000 draws.
    np.testing.assert_allclose(drawn.mean(0), wanted, atol=5 * 0.5 / 4000**0.5)


def test_gumbel_has_the_gradient_of_the_softmax() -> None:
    def total(query: Array, attention: Any) -> Array:
        return jnp.sum(attention(query, KEY, VALUE, MASK)[0] * VALUE[:, :QUERIES])

    of_gumbel = jax.grad(total)(QUERY, gumbel_attention)
    assert np.any(of_gumbel)
    np.testing.assert_allclose(of_gumbel, jax.grad(total)(QUERY, soft_attention), atol=1e-5)
    assert not np.any(jax.grad(total)(QUERY, hard_attention))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_gumbel_has_the_gradient_of_the_softmax_with_its_noise(temperature: float) -> None:
    key = jax.random.key(3)
    noise = jax.random.gumbel(key, (HEADS, QUERIES, KEYS))

    def sampled(query: Array) -> Array:
        more = {"key": key, "temperature": temperature}
        return jnp.sum(gumbel_attention(query, KEY, VALUE, MASK, **more)[0] * QUERY)

    def soft(query: Array) -> Array:
        logarithms = jax.nn.log_softmax(scores.scaled_dot(query, KEY), where=MASK)
        noisy = jnp.where(MASK, (logarithms + noise) / temperature, -jnp.inf)
        weights = jax.nn.softmax(noisy.at[:, 1].set(0.0)).at[:, 1].set(0.0)  # 1 sees no key
        return jnp.sum((weights @ VALUE) * QUERY)

    wanted = jax.grad(soft)(QUERY).at[:, 1].set(0.0)
    np.testing.assert_allclose(jax.grad(sampled)(QUERY), wanted, atol=1e-5)


def test_windows_and_temperatures_that_make_no_sense_are_refused() -> None:
    for attention in (local_m_attention, partial(local_p_attention, center=CENTER)):
        with pytest.raises(ValueError, match="window=0: must be at least 1"):
            attention(QUERY, KEY, VALUE, window=0)
    with pytest.raises(ValueError, match="window=-1: must be at least 0"):
        Mask(window=-1)
    with pytest.raises(ValueError, match=r"temperature=0\.0: must be above 0"):
        gumbel_attention(QUERY, KEY, VALUE, temperature=0.0)
