"""The two-step top-k and the argmax, against JAX's, with equal values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.decoding.top_k import first_argmax, top_k


@pytest.mark.parametrize("values", [2, 5, 1000])
@pytest.mark.parametrize(("size", "count"), [(4000, 10), (60, 4), (97, 3), (12, 12), (4096, 1)])
def test_it_is_jaxs_top_k(size: int, count: int, values: int) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(0, values, (20, size)), jnp.float32)
    x = jnp.where(x == 0, -jnp.inf, x)
    x = x.at[0].set(-jnp.inf)
    chosen, wanted = jax.jit(top_k, static_argnums=1)(x, count), jax.lax.top_k(x, count)
    for ours, theirs in zip(chosen, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(first_argmax(x), jnp.argmax(x, axis=-1))
