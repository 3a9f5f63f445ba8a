"""Compares layers stored one by one with layers stacked as [L, ...] and run by `lax.scan`.

    python -m tools.layers

Times a training step of both in turns, and its compilation, for the presets tiny and small. Writes
results/layers.json. The model stores layers one by one; the stacked version is here only.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformer_jax.allocator import restart_with_allocator
from transformer_jax.attention import Context, Mask, padding_mask
from transformer_jax.benchmark import results
from transformer_jax.benchmark.timing import time_in_turns, timer
from transformer_jax.config import SMALL, TINY, ModelConfig
from transformer_jax.models.layers import DecoderLayer, EncoderLayer
from transformer_jax.models.transformer import Transformer
from transformer_jax.parallel.compile import compile_step
from transformer_jax.parallel.mesh import make_mesh, replicate
from transformer_jax.training.losses import token_loss
from transformer_jax.training.step import (
    Averages,
    LossFn,
    LossSums,
    init_state,
    loss_fn,
    train_step,
)
from transformer_jax.types import Batch, Key, Params

SIZES = {"tiny": (TINY, 4000, 256, 16), "small": (SMALL, 8000, 128, 32)}
"""Model, vocabulary, rows and length of a batch."""
SAMPLES = 11


def stack(params: Params) -> Params:
    """Returns the same parameters with each stack's layers as one tree of [L, ...] arrays."""

    def joined(side: Params) -> Params:
        layers = [side[f"layers_{i}"] for i in range(len(side))]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)

    return params | {name: joined(params[name]) for name in ("encoder", "decoder")}


def stacked_loss(config: ModelConfig, vocabulary: int) -> LossFn:
    """Returns the loss of the post-norm model with stacked layers, like `loss_fn`."""
    model = Transformer(config, vocabulary, vocabulary)
    encoder_layer, decoder_layer = EncoderLayer(config), DecoderLayer(config)

    def loss(params: Params, batch: Batch, key: Key | None, averages: Averages) -> Any:
        variables = {"params": {"target_embedding": params["target_embedding"]}}

        def embed(ids: jax.Array, key: Key) -> jax.Array:
            positions = jnp.arange(ids.shape[1])[None, :]

            def run(m: Transformer) -> jax.Array:
                return m.target_embedding(ids, positions, key)

            return jnp.asarray(model.apply(variables, method=run))

        memory_context = Context(padding_mask(batch.source))
        causal = Context(Mask(causal=True))
        assert key is not None
        keys = jax.random.split(key, 4)

        def encode(x: jax.Array, layer: tuple[Params, Key]) -> tuple[jax.Array, None]:
            y, _ = encoder_layer.apply({"params": layer[0]}, x, memory_context, layer[1])
            return y, None

        depth, depth_out = config.depths
        memory, _ = jax.lax.scan(
            encode,
            embed(batch.source, keys[0]),
            (params["encoder"], jax.random.split(keys[1], depth)),
        )

        def decode(x: jax.Array, layer: tuple[Params, Key]) -> tuple[jax.Array, None]:
            def run(m: DecoderLayer) -> jax.Array:
                keys_values = m.cross_attention.project(memory)
                return m(x, causal, keys_values, memory_context, layer[1])[0]

            return jnp.asarray(decoder_layer.apply({"params": layer[0]}, method=run)), None

        x, _ = jax.lax.scan(
            decode,
            embed(batch.target_in, keys[2]),
            (params["decoder"], jax.random.split(keys[3], depth_out)),
        )
        logits = model.apply(variables, x, method="logits")
        total, count = token_loss(jnp.asarray(logits), batch.target_out, 0.1)
        return total, LossSums(count, {})

    return loss


def measure(config: ModelConfig, vocabulary: int, rows: int, length: int) -> dict[str, Any]:
    """Returns median step times, compile times and temporaries."""
    rng = np.random.default_rng(0)
    batch = Batch(*(rng.integers(4, vocabulary, (rows, length), np.int32) for _ in range(3)))
    model = Transformer(config, vocabulary, vocabulary)
    mesh, key, optimizer = make_mesh(), jax.random.key(0), optax.adam(1e-3)
    init = compile_step(lambda key, batch: model.init(key, batch)["params"], mesh)
    params = jax.tree.map(np.asarray, init(key, batch))
    losses = {
        "separate": (params, loss_fn(model, 0.1)),
        "stacked": (jax.tree.map(np.asarray, stack(params)), stacked_loss(config, vocabulary)),
    }
    steps, states, found = {}, {}, {}
    for name, (start, loss) in losses.items():
        states[name] = init_state(replicate(start, mesh), optimizer)
        step = compile_step(partial(train_step, loss=loss, optimizer=optimizer), mesh)
        began = time.perf_counter()
        steps[name] = step.lower(states[name], batch, key).compile()
        found[name] = {
            "compile_s": time.perf_counter() - began,
            "temporaries_mib": steps[name].memory_analysis().temp_size_in_bytes / 2**20,
        }

    def run(name: str) -> None:
        jax.block_until_ready(steps[name](states[name], batch, key))

    times = time_in_turns({name: timer(partial(run, name)) for name in losses}, SAMPLES)
    for name, samples in times.items():
        found[name]["step_ms"] = samples.median * 1e3
    return found | {"rows": rows, "length": length, "vocabulary": vocabulary}


def main() -> None:
    """Measures both presets and writes the result file."""
    restart_with_allocator()
    found = {name: measure(*size) for name, size in SIZES.items()}
    print(results.write("layers", "make layers", {"presets": found}))


if __name__ == "__main__":
    main()
