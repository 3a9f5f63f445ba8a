"""Every kernel against attention in float64: masks, packing, windows, shared heads, types.

What is exact is compared with the formula and with finite differences in tests/benchmark.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from common import with_rare
from jax.experimental.pallas import tpu as pallas_tpu
from jaxtyping import Array

from transformer_jax.attention import Mask, attend, kernels
from transformer_jax.attention import blockwise as blockwise_module
from transformer_jax.attention.blockwise import Blocks, blockwise
from transformer_jax.benchmark.attention_report import ERROR_LIMITS
from transformer_jax.benchmark.exact import exact

Inputs = tuple[Array, Array, Array]

SEGMENTS = jnp.array([[1] * 9 + [2] * 6 + [0] * 5, [1] * 4 + [2] * 3 + [3] * 12 + [0]])
POSITIONS = jnp.array([[*range(9), *range(6), *[0] * 5], [*range(4), *range(3), *range(12), 0]])
KEY_SEGMENTS = jnp.array([[1] * 3 + [2] * 8 + [0] * 2, [2] * 5 + [3] * 7 + [0]])
PADDING = jnp.array([[1] * 20, [1] * 7 + [0] * 13])
OWN = (SEGMENTS, POSITIONS)

MASKS: dict[str, tuple[Mask | None, int]] = {
    "none": (None, 20),
    "nothing to see": (Mask(key_segments=PADDING * jnp.array([[1], [0]])), 20),
    "causal": (Mask(causal=True), 20),
    "causal with padding": (Mask(key_segments=PADDING, causal=True), 20),
    "causal window": (Mask(window=3, causal=True), 20),
    "cross lengths": (None, 13),
    "cross window": (Mask(window=2), 13),
    "packed, causal": (Mask(*OWN, *OWN, causal=True), 20),
    "packed, causal window": (Mask(*OWN, *OWN, causal=True, window=2), 20),
    "packed, cross": (Mask(*OWN, KEY_SEGMENTS, aligned=False), 13),
    "one step of decoding": (Mask(None, jnp.full((1, 20), 4), causal=True, aligned=False), 20),
}


def in_blocks(blocks: Blocks) -> kernels.AnyKernel:
    def kernel(query: Array, key: Array, value: Array, mask: Mask | None, **_: Any) -> Any:
        return blockwise(query, key, value, mask, blocks=blocks)

    return kernel


KERNELS: dict[str, Any] = {
    "reference": "reference",
    "xla": "xla",
    "blockwise": "blockwise",
    "small blocks": in_blocks(Blocks(3, 3, 4)),
    "uneven blocks": in_blocks(Blocks(5, 7, 5)),
}


def inputs(keys: int, heads: int = 4, shared: int = 4, dtype: Any = jnp.float32) -> Inputs:
    def draw(seed: int, heads: int, length: int) -> Array:
        return jax.random.normal(jax.random.key(seed), (2, heads, length, 8)).astype(dtype)

    return draw(0, heads, 20), draw(1, shared, keys), draw(2, shared, keys)


def computed(kernel: Any, arrays: Inputs, mask: Mask | None, gradient: Array) -> list[Array]:
    def output_of(query: Array, key: Array, value: Array) -> Array:
        return attend(query, key, value, mask, kernel=kernel)[0]

    @jax.jit
    def run(arrays: Inputs) -> Any:
        output, back = jax.vjp(output_of, *arrays)
        return [output, *back(gradient.astype(output.dtype))]

    return run(arrays)


def assert_exact(
    kernel: Any, arrays: Inputs, mask: Mask | None, gradient: Any = None, limit: float = 2e-6
) -> None:
    """Output and gradients have the type of the query, and are those in float64."""
    if gradient is None:
        gradient = jax.random.normal(jax.random.key(3), arrays[0].shape)
    with jax.default_matmul_precision("float32"):
        ours = computed(kernel, arrays, mask, gradient)
    shape = arrays[0].shape[2], arrays[1].shape[2]
    seen = None if mask is None else np.broadcast_to(mask.dense(*shape), (2, 1, *shape))[:, 0]
    for a, b in zip(ours, exact([*arrays, gradient], seen).arrays, strict=True):
        assert a.dtype == arrays[0].dtype
        a = np.asarray(a, np.float32).reshape(b.shape)
        np.testing.assert_allclose(a, b, rtol=0, atol=limit * np.abs(b).max())


CASES = [(mask, 4, "float32") for mask in MASKS]
CASES += [("packed, causal", 2, "float32"), ("cross window", 1, "float32")]
CASES += [("packed, causal window", 2, "bfloat16"), ("cross window", 1, "bfloat16")]
OPTIMIZED = ("packed, causal", 2, "float32")


@pytest.mark.parametrize(
    ("mask", "shared", "dtype"),
    [pytest.param(*c, marks=[pytest.mark.optimized] if c == OPTIMIZED else []) for c in CASES],
)
@pytest.mark.parametrize("kernel", with_rare(KERNELS, ("uneven blocks",)))
def test_kernels_are_attention(kernel: str, mask: str, shared: int, dtype: str) -> None:
    rule, keys = MASKS[mask]
    arrays = inputs(keys, shared=shared, dtype=dtype)
    assert_exact(KERNELS[kernel], arrays, rule, limit=ERROR_LIMITS[dtype])


PIECES = (jnp.arange(700)[None] // 90 + 1) * (jnp.arange(700)[None] < 650)
PACKED = (PIECES, jnp.arange(700)[None] % 90)
LONG_MASKS = {
    "causal": Mask(causal=True),
    "window": Mask(window=40),
    "packed, causal window": Mask(*PACKED, *PACKED, causal=True, window=20),
}


@pytest.mark.parametrize("all_at_once", [True, False])
@pytest.mark.parametrize("mask", LONG_MASKS)
def test_the_blocks_that_are_chosen_for_long_sentences(
    mask: str, all_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uneven blocks of several heads, and windows that leave most keys out."""
    if not all_at_once:
        monkeypatch.setattr(blockwise_module, "SINGLE_BLOCK_SCORES", 2**12)
        monkeypatch.setattr(blockwise_module, "BLOCK_SCORES", 2**17)
        monkeypatch.setattr(blockwise_module, "MAX_BLOCK", 256)
    rule = LONG_MASKS[mask]
    query, keys = (jax.random.normal(jax.random.key(n), (1, n, 700, 8)) for n in (4, 2))
    arrays = (query, keys, keys[:, ::-1])
    windowed = rule.window is not None
    size = blockwise_module.choose_blocks(2, 2, 700, 700, rule)
    assert (size.keys < 700) == (windowed or not all_at_once)
    assert_exact("auto", arrays, rule)


BLOCKS = jnp.array([[1] * 100 + [2] * 60 + [3] * 70 + [0] * 26])
PALLAS_MASKS = {
    "none": None,
    "causal": Mask(causal=True),
    "padding": Mask(key_segments=jnp.array([[1] * 200 + [0] * 56])),
    "packed, causal": Mask(query_segments=BLOCKS, key_segments=BLOCKS, causal=True),
}
RARE = ("none", "causal", "padding")


def large(dtype: Any = "float32") -> list[Array]:
    """Query, key, value and the output's gradient; two query heads share the keys."""
    shapes = [(2, heads, 256, 64) for heads in (2, 1, 1, 2)]
    return [jax.random.normal(jax.random.key(i), s, dtype) for i, s in enumerate(shapes)]


@pytest.mark.parametrize("mask", with_rare(PALLAS_MASKS, RARE))
def test_pallas_as_its_interpreter_runs_it(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's kernel for TPUs receives the right arguments, and its output is read correctly."""
    query, key, value, gradient = large()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pallas_tpu.force_tpu_interpret_mode():
        assert_exact("pallas", (query, key, value), PALLAS_MASKS[mask], gradient)


ON_GPUS = [("cudnn", "bfloat16"), ("auto", "bfloat16")]
ON_GPUS += [(kernel, "float32") for kernel in ("xla", "blockwise", "reference")]


@pytest.mark.gpu
@pytest.mark.parametrize("mask", PALLAS_MASKS)
@pytest.mark.parametrize(("kernel", "dtype"), ON_GPUS)
def test_kernels_are_attention_on_a_gpu(kernel: str, dtype: Any, mask: str) -> None:
    query, key, value, gradient = large(dtype)
    assert_exact(kernel, (query, key, value), PALLAS_MASKS[mask], gradient, ERROR_LIMITS[dtype])


def test_pallas_refuses_what_it_would_get_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    stepping, keys = MASKS["one step of decoding"]
    with pytest.raises(ValueError, match="'pallas': does not support causal masks whose positions"):
        attend(*inputs(keys), stepping, kernel="pallas")
    with pytest.raises(ValueError, match=r"kernel pallas: .*block.*; use xla"):
        attend(*inputs(20), kernel="pallas")


def half_kernel(query: Array, key: Array, value: Array, *_: Any, **__: Any) -> Any:
    """A user's kernel whose output has a type of its own."""
    return (query + jnp.sum(key) + jnp.sum(value)).astype(jnp.float16), None


@pytest.mark.parametrize("kernel", ["reference", "xla", "blockwise", half_kernel])
@pytest.mark.parametrize("types", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_output_has_the_querys_type_and_gradients_those_of_the_arrays(
    kernel: Any, types: tuple[str, str]
) -> None:
    query, key, value = inputs(20)
    mixed = (query.astype(types[0]), key.astype(types[0]), value.astype(types[1]))
    output, *gradients = computed(kernel, mixed, None, query)
    assert output.dtype == types[0]
    assert [g.dtype.name for g in gradients] == [types[0], types[0], types[1]]


@pytest.mark.parametrize("kernel", ["reference", "xla", "blockwise"])
def test_large_scores_do_not_overflow(kernel: str) -> None:
    query, key, value = inputs(20)
    for leaf in computed(kernel, (1e3 * query, 1e3 * key, value), Mask(causal=True), value):
        assert jnp.isfinite(leaf).all()


def test_bias_is_added_to_the_scores() -> None:
    query, key, value = inputs(20)
    bias = jax.random.normal(jax.random.key(4), (1, 4, 20, 20))
    # The bias as one more column of query and key each, for every pair of positions apart.
    for kernel in ("reference", "xla"):
        output, _ = attend(query, key, value, bias=bias, kernel=kernel)
        scores = jnp.einsum("bnth,bnsh->bnts", query, key) / 8**0.5 + bias
        wanted = jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(scores), value)
        np.testing.assert_allclose(output, wanted, atol=2e-6)


BIAS, DENSE = jnp.zeros((1, 1, 20, 20)), jnp.ones((1, 1, 1, 20), bool)
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (r"kernel 'blokwise': unknown; did you mean blockwise\?", {"kernel": "blokwise"}),
    (r"kernel 'math:pi': is not a function", {"kernel": "math:pi"}),
    (r"not int and \(2, 4, 20, 8\) and NoneType", {"kernel": lambda q, *_, **__: (1, q, None)}),
    (r"not \(2, 4, 20, 8\)$", {"kernel": lambda q, *_, **__: q}),
    (r"not ndarray and NoneType", {"kernel": lambda q, *_, **__: (np.zeros(q.shape), None)}),
    (r"not \(2, 4, 20, 8\) and \(2, 4, 20, 8\)", {"kernel": lambda q, *_, **__: (q, q)}),
    (r"'blockwise': .* a bias, which this .*; use auto,", {"kernel": "blockwise", "bias": BIAS}),
    (r"'blockwise': .* dropout, .*; use auto or", {"kernel": "blockwise", "dropout": lambda w: w}),
    (r"kernel='pallas': runs on tpu, not on cpu; use xla", {"kernel": "pallas"}),
    (r"'pallas': does not support windows, .*; use", {"kernel": "pallas", "mask": Mask(window=3)}),
    (r"'blockwise': .* dense masks, .*; use auto, ref", {"kernel": "blockwise", "mask": DENSE}),
    (r"weights or None\), not \(2, 4, 20, 1\)", {"kernel": lambda q, *_, **__: (q[..., :1], None)}),
]


@pytest.mark.parametrize(("message", "options"), REFUSED, ids=range(len(REFUSED)))
def test_what_a_kernel_cannot_do_is_refused(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        attend(*inputs(20), **options)


def test_what_cudnn_has_not_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> Array:
        raise NotImplementedError("odd lengths")

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", refuses)
    with pytest.raises(ValueError, match="kernel cudnn: odd lengths; use xla"):
        attend(*inputs(20, dtype=jnp.bfloat16), kernel="cudnn")


@pytest.fixture
def untyped() -> Iterator[None]:
    """As for a user, whose shapes and types nothing checks before `attend` does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("untyped")
def test_shapes_that_do_not_match_are_refused() -> None:
    query, key, value = inputs(20)
    for wrong in (
        (query, key, value[:, :, :9]),
        (query[..., :4], key, value),
        (query[:1], key, value),
        (query[0], key[0], value[0]),
        (query, key[:, :, 0], value[:, :, 0]),
    ):
        with pytest.raises(ValueError, match=r"query \(.*, value \(.*: must be \[B, N, T, H\]"):
            attend(*wrong)


@pytest.mark.usefixtures("untyped")
def test_a_mask_of_numpy_is_dense_at_every_length() -> None:
    query, key, value = (jnp.ones((1, 1, 150, 4)) for _ in range(3))
    seen: Any = np.tril(np.ones((1, 1, 150, 150), bool))
    output, _ = attend(query, key, value, seen)
    np.testing.assert_allclose(output, value, rtol=1e-5)


def test_query_heads_are_a_multiple_of_key_heads() -> None:
    with pytest.raises(ValueError, match="4 query heads: must be a multiple of the 3 KV heads"):
        attend(*inputs(20, shared=3))


def sizes(queries: int, keys: int, width: int = 64, dtype: str = "float32") -> Any:
    """Query and key of 8 heads as shapes and types."""
    return [jax.ShapeDtypeStruct((1, 8, n, width), jnp.dtype(dtype)) for n in (queries, keys)]


def test_auto_takes_what_can_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    long, between = sizes(4096, 4096), sizes(64, 64)
    assert kernels.choose(*sizes(16, 16)) == "reference"
    assert kernels.choose(*between) == "blockwise"
    assert kernels.choose(*between, mask=Mask(causal=True)) == "reference"
    assert kernels.choose(*long, bias=True) == "reference"
    assert kernels.choose(*long, mask=jnp.ones((1, 1, 1, 4096), bool)) == "reference"
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert kernels.choose(*long, bias=True) == "xla"
    assert kernels.choose(*long, dropout=True) == "reference"


AUTO_ON_GPUS: list[tuple[str, str | None, dict[str, Any], dict[str, Any]]] = [
    ("cudnn", "8.0", {}, {}),
    ("cudnn", "10.3", {"dtype": "float16"}, {}),
    ("cudnn", "9.0", {}, {"mask": Mask(causal=True)}),
    ("cudnn", "9.0", {"queries": 1}, {}),
    ("xla", "7.5", {}, {}),
    ("xla", "gfx942", {}, {}),
    ("xla", None, {}, {}),
    ("xla", "9.0", {"dtype": "float32"}, {}),
    ("xla", "9.0", {"width": 136}, {}),
    ("xla", "9.0", {"width": 20}, {}),
    ("xla", "9.0", {"queries": 1}, {"mask": Mask(causal=True)}),
    ("xla", "9.0", {"keys": 63}, {"mask": Mask(causal=True)}),
    ("xla", "9.0", {}, {"bias": True}),
    ("reference", "9.0", {}, {"dropout": True}),
]


@pytest.mark.parametrize(("kernel", "capability", "shape", "options"), AUTO_ON_GPUS)
def test_auto_on_gpus(
    kernel: str, capability: str | None, shape: Any, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is `cudnn` if that supports the attention and its gradient, on GPUs of NVIDIA only."""
    device = SimpleNamespace(**({"compute_capability": capability} if capability else {}))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    shapes = sizes(**({"queries": 64, "keys": 64, "dtype": "bfloat16"} | shape))
    assert kernels.choose(*shapes, **options) == kernel


def test_memory_of_blockwise_is_linear_in_length() -> None:
    def temporaries(kernel: str, length: int) -> int:
        shape = jax.ShapeDtypeStruct((1, 2, length, 16), jnp.float32)

        def total(*arrays: Array) -> Array:
            return jnp.sum(attend(*arrays, kernel=kernel)[0])

        step = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(shape, shape, shape).compile()
        memory = step.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temporaries("blockwise", 8192) < 2.5 * temporaries("blockwise", 4096)
    assert temporaries("blockwise", 4096) < temporaries("reference", 4096) / 8
