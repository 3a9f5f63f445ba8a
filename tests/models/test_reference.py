"""The model agrees with one built from PyTorch's own layers (tests/fixtures/torch_*.npz)."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import assert_gradients_close, loss_of

from transformer_jax.attention.positions import sinusoids
from transformer_jax.config import ModelConfig
from transformer_jax.interop.arrays import params_from_arrays
from transformer_jax.models.transformer import Transformer
from transformer_jax.special_ids import PAD
from transformer_jax.types import Batch, Params


class Reference:
    """One file of inputs, weights and answers, and our model of the same architecture."""

    def __init__(self, path: Path, norm: Any) -> None:
        self.data = dict(np.load(path))
        sizes: dict[str, Any] = {"layers": 2, "d_model": 32, "heads": 4, "d_ff": 64}
        config = ModelConfig(**sizes, max_length=16, norm=norm, dropout=0.0)
        self.model = Transformer(config, 53, 53)
        self.batch = Batch(*(jnp.asarray(self.data[k]) for k in ("src", "tgt_in", "tgt_out")))
        self.shapes = jax.eval_shape(self.model.init, jax.random.key(0), self.batch)["params"]
        self.params = self.tree("param")

    def tree(self, kind: str) -> Params:
        """Its parameters or gradients by our names, with heads in a dimension of their own."""

        def theirs(ours: str) -> str:
            return ours.replace("layers_", "").replace("target_embedding", "embed")

        parts = {name.partition("/"): array for name, array in self.data.items()}
        arrays = {name: array for (part, _, name), array in parts.items() if part == kind}
        return params_from_arrays(arrays, self.shapes, theirs)


@pytest.fixture(scope="module", params=["post", "pre"])
def reference(request: pytest.FixtureRequest) -> Reference:
    folder = Path(__file__).parents[1] / "fixtures"
    return Reference(folder / f"torch_{request.param}_ln.npz", request.param)


def test_logits(reference: Reference) -> None:
    run: Any = jax.jit(reference.model.apply)
    logits = run({"params": reference.params}, reference.batch).logits
    real = reference.data["tgt_out"] != PAD
    np.testing.assert_allclose(logits[real], reference.data["logits"][real], rtol=0, atol=1e-4)


def test_loss_and_gradients(reference: Reference) -> None:
    data, batch = reference.data, reference.batch
    grad = jax.jit(jax.value_and_grad(loss_of(reference.model), has_aux=True))
    (smoothed, (count, _)), gradient = grad(reference.params, batch, None, {})
    plain, _ = jax.jit(loss_of(reference.model, 0.0))(reference.params, batch, None, {})
    np.testing.assert_allclose(smoothed / count, data["loss_smoothed"], rtol=1e-5)
    np.testing.assert_allclose(plain / count, data["loss_plain"], rtol=1e-5)
    mean = jax.tree.map(lambda g: g / count, gradient)
    assert_gradients_close(mean, reference.tree("grad"), 1e-4)


def test_positions(fixtures: Path) -> None:
    wanted = np.load(fixtures / "torch_post_ln.npz")["positional"]
    np.testing.assert_allclose(sinusoids(128, 64), wanted, rtol=0, atol=1e-6)
