"""The Transformer: every variant, decoding by steps, packing, export."""

import math
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from common import (
    LENGTHS,
    assert_gradients_close,
    assert_learns,
    assert_steps_are_teacher_forcing,
    build,
    flat,
    forward,
    gradient,
    loss_of,
    make_batch,
    pack,
    tiny,
    with_rare,
)
from jax import export

from transformer_jax.attention import Context, Mask
from transformer_jax.config import BASE, ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.flops import products
from transformer_jax.models.embedding import Embedding
from transformer_jax.models.feed_forward import ACTIVATIONS, FeedForward
from transformer_jax.models.layers import Decoder, DecoderLayer, EncoderLayer
from transformer_jax.models.make import check_model, count_parameters
from transformer_jax.models.transformer import Transformer
from transformer_jax.special_ids import PAD

pytestmark = pytest.mark.usefixtures("strict")

VARIANTS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "pre-norm, deeper encoder": {"norm": "pre", "layers": 2, "decoder_layers": 1},
    "deeper decoder, decoder tied": {"decoder_layers": 2, "tied": "decoder"},
    "untied, output bias, gelu": {"tied": "none", "output_bias": True, "activation": "gelu"},
    "learned positions, silu": {"positions": "learned", "tied": "decoder", "activation": "silu"},
    "odd width, scale": {"positions": "learned", "d_model": 15, "heads": 3, "embedding_scale": 2.0},
    "no positions": {"positions": "none"},
    "swiglu, no biases, halves": {
        "activation": "swiglu",
        "bias": False,
        "position_layout": "halves",
        "position_wavelengths": "marian",
        "norm_eps": 1e-5,
    },
}


RARE = ("deeper decoder, decoder tied", "learned positions, silu", "no positions")
"""What differs little from another variant is tried by `make test-slow`."""


@pytest.fixture(params=with_rare(VARIANTS, RARE))
def variant(request: pytest.FixtureRequest) -> ModelConfig:
    return tiny(**VARIANTS[request.param])


def shapes_of(config: ModelConfig, source: int, target: int) -> dict[str, Any]:
    """Names and shapes of the parameters, without making them."""
    model = Transformer(config, source, target)
    tree = jax.eval_shape(model.init, jax.random.key(0), make_batch([(3, 3)]))
    assert set(tree) == {"params"}
    return flat(tree["params"])


def size_of(shapes: dict[str, Any]) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in shapes.values())


# ----- parameters


def test_the_parameter_count_of_the_base_model() -> None:
    config, vocabulary = BASE, 37000
    d, f, n = config.d_model, config.d_ff, config.layers
    attention, ffn, norm = 4 * (d * d + d), 2 * d * f + f + d, 2 * d
    wanted = vocabulary * d + n * (3 * attention + 2 * ffn + 5 * norm)
    assert size_of(shapes_of(config, vocabulary, vocabulary)) == wanted
    assert count_parameters(config, vocabulary, vocabulary) == wanted


def test_parameter_counts_of_variants(variant: ModelConfig) -> None:
    source = 13 if variant.tied == "all" else 17
    shapes = shapes_of(variant, source, 13)
    assert count_parameters(variant, source, 13) == size_of(shapes)
    assert all(leaf.dtype == jnp.float32 for leaf in shapes.values())


def test_initial_values() -> None:
    model = Transformer(tiny(tied="none", output_bias=True), 400, 500)
    batch = make_batch([(3, 3)])
    init = jax.jit(model.init)
    params = init(jax.random.key(0), batch)["params"]
    again = flat(init(jax.random.key(0), batch)["params"])
    other = flat(init(jax.random.key(1), batch)["params"])
    for name, leaf in flat(params).items():
        np.testing.assert_array_equal(leaf, again[name])
        if name.endswith(("kernel", "output")):
            # Xavier's bound for the whole matrix, whatever its heads.
            inputs = leaf.size // 16 if name.endswith("out/kernel") else leaf.shape[0]
            bound = (6 / (inputs + leaf.size // inputs)) ** 0.5
            assert 0.97 * bound < np.abs(leaf).max() <= bound
            assert np.any(leaf != other[name])
        elif name.endswith("embedding"):
            np.testing.assert_allclose(np.std(leaf), 16**-0.5, rtol=0.05)
        else:
            assert (leaf == (1.0 if name.endswith("scale") else 0.0)).all()


def test_two_vocabularies_cannot_be_tied() -> None:
    with pytest.raises(ValueError, match=r"tied='all': must be decoder .* of 13 and 17 ids"):
        shapes_of(tiny(), 13, 17)


# ----- forward and backward


def test_variants_learn_all_that_they_hold(variant: ModelConfig) -> None:
    assert_learns(variant)


@pytest.mark.parametrize("changes", [{"norm_eps": 0.1}, {"embedding_scale": 1.0}])
def test_options_change_the_output(changes: dict[str, Any]) -> None:
    batch = make_batch(LENGTHS)
    (plain, _), (changed, _) = forward(tiny())(batch), forward(tiny(**changes))(batch)
    assert np.abs(plain - changed).max() > 1e-3


def test_without_a_start_id_the_decoder_begins_with_zeros() -> None:
    """As with a start symbol that is embedded as zeros."""
    config, batch = tiny(tied="none", decoder_start_id=None), make_batch(LENGTHS)
    batch.target_in[:, 0] = config.start_id
    params = build(config)[1]
    table = params["target_embedding"]["embedding"].at[PAD].set(0.0)
    zeros = params | {"target_embedding": {"embedding": table}}
    wanted, _ = forward(tiny(tied="none", decoder_start_id=PAD))(batch, None, zeros)
    np.testing.assert_array_equal(forward(config)(batch, None, params)[0], wanted)


GELUS: dict[str, Callable[[float], float]] = {
    "gelu": lambda x: x * (1 + math.erf(x / 2**0.5)) / 2,
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
}


@pytest.mark.parametrize("name", GELUS)
def test_gelus_are_those_of_their_formulas(name: str) -> None:
    """gelu is PyTorch's default; its tanh approximation differs by up to 5e-4."""
    x = jnp.linspace(-4.0, 4.0, 15).reshape(1, 1, 15)
    eye = {"kernel": jnp.eye(15), "bias": jnp.zeros(15)}
    config = ModelConfig(d_model=15, heads=3, d_ff=15, positions="learned", activation=name)
    params = {"in": eye, "out": eye}
    output, _ = FeedForward(config).apply({"params": params}, x, None)
    values = [GELUS[name](value) for value in x.ravel().tolist()]
    np.testing.assert_allclose(jnp.ravel(jnp.asarray(output)), values, atol=1e-6)


def test_a_hidden_layer_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It applies dense layers by name, and one that is unknown is refused."""
    with pytest.raises(UserError, match=r"model.activation='bilinear': unknown; known: relu, "):
        check_model(tiny(activation="bilinear"))
    monkeypatch.setitem(ACTIVATIONS, "bilinear", lambda project: project("a") * project("b"))
    config, x = tiny(activation="bilinear"), jnp.linspace(-1.0, 1.0, 2 * 16).reshape(1, 2, 16)
    (output, _), variables = FeedForward(config).init_with_output(jax.random.key(0), x, None)
    params: Any = variables["params"]
    hidden = (x @ params["a"]["kernel"]) * (x @ params["b"]["kernel"])
    np.testing.assert_allclose(output, hidden @ params["out"]["kernel"], atol=1e-6)


@pytest.fixture
def promotion(strict: None) -> Iterator[None]:
    """Flax's layer normalization promotes bfloat16 by itself."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("promotion")
def test_bfloat16_computes_near_float32() -> None:
    batch = make_batch(LENGTHS)
    config = tiny(dtype="bfloat16")
    model, params = build(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0), batch)["params"]
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(shapes))
    logits, weights = forward(config)(batch)
    exact, _ = forward(tiny())(batch)
    assert logits.dtype == jnp.float32
    assert all(each.dtype == jnp.float32 for each in weights.values())
    real = batch.target_out != PAD
    assert 0 < np.abs(logits - exact)[real].max() < 0.05 * np.abs(exact).max()
    encode = partial(model.apply, method="encode")
    memory, _ = jax.eval_shape(encode, {"params": params}, jnp.asarray(batch.source))
    assert memory.dtype == jnp.bfloat16


@pytest.mark.parametrize("where", ["dropout", "attention_dropout", "ffn_dropout"])
def test_dropout_with_a_key(where: str) -> None:
    batch = make_batch(LENGTHS)
    run, (plain, _) = forward(tiny(**{where: 0.5})), forward(tiny())(batch)
    one, again = run(batch, jax.random.key(0))[0], run(batch, jax.random.key(0))[0]
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - plain).max() > 1e-3
    assert np.abs(one - run(batch, jax.random.key(1))[0]).max() > 1e-3


def test_dropout_is_on_embeddings_and_on_what_every_sublayer_adds() -> None:
    """The number of unchanged elements is that of elements dropped independently at every place."""
    config, key = tiny(dropout=0.5, norm="pre"), jax.random.key(0)
    ids, mask = jnp.full((8, 16), 3), Mask()
    context = Context(mask, jnp.arange(16)[None])
    x = jax.random.normal(key, (8, 16, 16))

    def unchanged(module: Any, before: Any, *arguments: Any, method: Any = None) -> float:
        run = jax.jit(lambda: module.init_with_output(key, *arguments, key, method=method)[0])
        output = run()
        return float(np.mean((output if method else output[0]) == before))

    def decode(layer: DecoderLayer, x: Any, key: Any) -> Any:
        return layer(x, context, layer.cross_attention.project(x), Context(mask), key)[0]

    def embed(module: Embedding, ids: Any, key: Any) -> Any:
        return module(ids, None, key)

    # Five standard deviations of the mean of 2,048 coin tosses.
    assert abs(unchanged(Embedding(config, 11), 0.0, ids, method=embed) - 1 / 2) < 0.055
    assert abs(unchanged(EncoderLayer(config), x, x, context) - 1 / 4) < 0.05
    assert abs(unchanged(DecoderLayer(config), x, x, method=decode) - 1 / 8) < 0.04


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_empty_rows_are_finite_and_have_no_gradient(norm: Any) -> None:
    run = gradient(tiny(norm=norm))
    (total, count), grads = run(make_batch([(0, 0)] * 4))
    assert (total, count) == (0, 0)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))
    # An empty source beside a target: nothing to attend to, and still a loss.
    (total, _), grads = run(make_batch([(0, 4), (3, 5), (0, 0), (7, 6)]))
    assert jnp.isfinite(total)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("layer", ["attention", "ssru"])
def test_packed_loss_and_gradients_are_the_unpacked(layer: str) -> None:
    run, batch = gradient(tiny(self_layer=layer)), make_batch(LENGTHS)
    (apart, count), wanted = run(batch)
    (together, packed_count), gradients = run(pack(batch, [[2, 0], [3, 1]], 18))
    assert packed_count == count == 13
    np.testing.assert_allclose(together, apart, rtol=1e-5)
    assert_gradients_close(gradients, wanted, 1e-5)


def test_longer_than_the_positions_is_an_error() -> None:
    model, params = build(tiny(max_length=8))
    ids = jnp.ones((1, 9), jnp.int32)
    with pytest.raises(ValueError, match=r"length=9: must be at most model\.max_length=8"):
        model.apply({"params": params}, ids, method="encode")
    with pytest.raises(ValueError, match=r"length=10: must be at most model\.max_length=8"):
        model.apply({"params": params}, ids[:, :8], beams=1, length=10, method="prefill")


# ----- decoding by steps


def test_steps_are_teacher_forcing() -> None:
    weights = assert_steps_are_teacher_forcing(tiny(layers=2), 3, 5e-6)
    assert weights["decoder/1/cross_attention"].shape == (6, 4, 2, 3, 7)


@pytest.mark.usefixtures("promotion")
def test_encode_and_step_export_with_symbolic_sizes() -> None:
    model, params = build(tiny(positions="learned", dtype="bfloat16"))
    rows, width = export.symbolic_shape("rows, width")
    ids = jax.ShapeDtypeStruct((rows, width), jnp.int32)

    def start(source: jax.Array) -> Any:
        return model.apply({"params": params}, source, 3, 9, method="prefill")

    def step(ids: jax.Array, state: Any, index: jax.Array) -> Any:
        return model.apply({"params": params}, ids, state, index, method="decode_step")[:2]

    started = export.export(jax.jit(start))(ids)
    state = jax.eval_shape(start, ids)
    last = jax.ShapeDtypeStruct((rows, 3), jnp.int32)
    stepped = export.export(jax.jit(step))(last, state, jax.ShapeDtypeStruct((), jnp.int32))
    source = jnp.asarray(make_batch(LENGTHS).source)
    state, first = started.call(source), jnp.full((4, 3), 1, jnp.int32)
    wanted = jax.jit(step)(first, jax.jit(start)(source), jnp.asarray(0))[0]
    logits, _ = stepped.call(first, state, jnp.asarray(0))
    np.testing.assert_allclose(logits, wanted, atol=1e-6)


def test_products_are_of_matrices_and_keys_are_not_copied() -> None:
    """XLA computes gradients of matrices from inputs of three dimensions at half of the rate."""
    model, params = build(tiny(heads=4, kv_heads=1))
    batch = make_batch(LENGTHS)
    grad = jax.grad(loss_of(model), has_aux=True)
    jaxpr = jax.make_jaxpr(grad)(params, batch, None, {}).jaxpr
    batched = 0
    for equation, _ in products(jaxpr):
        _, (batch_dimensions, _) = equation.params["dimension_numbers"]
        left, right = (x.aval.shape for x in equation.invars)
        if batch_dimensions:  # attention: a matrix for each sentence and its KV head
            batched += 1
            assert math.prod(left[:-2]) == math.prod(right[:-2]) == len(batch.source)
        else:
            assert len(left) == len(right) == 2
    assert batched == 6 * 3  # scores and context of 3 attentions, each with two gradients


@pytest.mark.long
def test_rematerialization_keeps_loss_and_gradients() -> None:
    """It computes activations again: with dropout, those of the same masks."""
    rates = {"dropout": 0.3, "attention_dropout": 0.3, "ffn_dropout": 0.3}
    model, params = build(tiny(**rates))
    arguments = (params, make_batch(LENGTHS), jax.random.key(1), {})

    def run(remat: str) -> tuple[int, Any, Any]:
        grad = jax.value_and_grad(loss_of(model.clone(remat=remat)), has_aux=True)
        traced = jax.jit(grad).trace(*arguments)
        (loss, _), tree = traced.lower().compile()(*arguments)
        return str(traced.jaxpr).count("dot_general"), loss, tree

    count, loss, wanted = run("none")
    for remat, more in {"matmuls": False, "layers": True}.items():
        products, other, tree = run(remat)
        np.testing.assert_allclose(other, loss, rtol=1e-6)
        error = optax.tree.norm(optax.tree.sub(tree, wanted))
        assert error <= 1e-6 * optax.tree.norm(wanted)
        assert (products > count) == more


@pytest.mark.gpu
@pytest.mark.parametrize("name", VARIANTS)
def test_the_gradient_on_a_gpu_is_that_on_a_cpu(name: str) -> None:
    model, params = build(tiny(**VARIANTS[name]))
    compute = jax.jit(jax.grad(loss_of(model), has_aux=True))
    gradients = []
    for platform in ("gpu", "cpu"):
        placed = jax.device_put((params, make_batch(LENGTHS)), jax.devices(platform)[0])
        with jax.default_matmul_precision("float32"):
            gradients.append(compute(*placed, None, {})[0])
    assert_gradients_close(*gradients, tolerance=1e-5)


def test_decoding_does_not_copy_the_cache() -> None:
    """Each step of a compiled loop writes one position of each cache in place."""
    model, params = build(tiny(layers=2))
    source = jnp.asarray(make_batch(LENGTHS).source)
    rows, beams, length = len(LENGTHS), 3, 10

    @partial(jax.jit, donate_argnums=1)
    def decode(params: Any, state: Any) -> Any:
        def step(index: Any, state: Any) -> Any:
            ids = jnp.full((rows, beams), 5)
            variables = {"params": params}
            output: Any = model.apply(variables, ids, state, index, method="decode_step")
            logits, state, _ = output
            parents = jax.lax.top_k(logits.max(-1), beams)[1]
            return state.reordered(parents)

        return jax.lax.fori_loop(0, length, step, state)

    state = model.apply({"params": params}, source, beams, length, method="prefill")
    program = decode.lower(params, state).compile().as_text() or ""
    heads, size = model.config.heads, model.config.head_size
    shapes = f"{rows},{heads},{size},{beams * length}", f"{rows},{heads},{beams * length},{size}"
    for shape in shapes:
        assert re.search(rf"f32\[{shape}\]\S* dynamic-update-slice\(", program)
        assert not re.search(rf"f32\[{shape}\]\S* copy\(", program)


def test_threads_make_classes_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flax changes the base classes meanwhile: searches in two threads have failed."""
    making: list[Any] = []
    at_a_time: list[int] = []

    def jit(layer: Any) -> Any:
        making.append(layer)
        at_a_time.append(len(making))
        time.sleep(0.01)
        making.remove(layer)
        return compiled(layer)

    compiled = nn.jit
    monkeypatch.setattr(nn, "jit", jit)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: Decoder(tiny()).bind({}).layers, range(4)))
    assert at_a_time == [1] * 4
