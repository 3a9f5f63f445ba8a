"""Draws docs/attention_*.svg: the weights of each kind of attention for the same small example.

python -m tools.pictures
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import plot
from transformer_jax.attention import Mask, alibi, functional, scores
from transformer_jax.attention.functional import masked_softmax
from transformer_jax.attention.positions import relative_bucket, rotate

SOURCE = ["I", "have", "read", "the", "old", "book", "."]
TARGET = ["ich", "habe", "das", "alte", "Buch", "gelesen", "."]
MEANT = [0, 1, 3, 4, 5, 2, 6]
"""The source word that each target word translates: German puts the verb last."""


def example() -> tuple[jax.Array, jax.Array]:
    """Returns 7 queries and 7 keys of width 16.

    A source word's key is random. A target word's query is the key of its source word, with noise.
    """
    draw = np.random.default_rng(3)
    keys, noise = draw.normal(size=(2, len(SOURCE), 16))
    query = 0.6 * keys[MEANT] + 0.4 * noise
    return jnp.asarray(query, jnp.float32), jnp.asarray(keys, jnp.float32)


def draw(folder: Path) -> None:
    """Writes docs/attention_NAME.svg for each picture."""
    folder.mkdir(exist_ok=True)
    query, keys = example()
    inputs, key = (query, keys, keys), jax.random.key(1)

    def save(name: str, panels: dict[str, Any], rows: Any = TARGET, columns: Any = SOURCE) -> None:
        """Writes a picture of attention weights [T, S] by their titles."""
        weights = {title: np.asarray(each) for title, each in panels.items()}
        figure = plot.attention_maps(weights, columns, rows, len(panels))
        plot.save(figure, folder / f"attention_{name}.svg")

    soft: Any = functional.soft_attention(*inputs)[1]
    save("soft", {"soft": soft})
    hard = functional.hard_attention
    sampled, likeliest = hard(*inputs, key=key)[1], hard(*inputs)[1]
    save("hard", {"training: sampled": sampled, "decoding: the likeliest": likeliest})
    gumbel = {"picked": functional.gumbel_attention(*inputs, key=key)[1]}
    gumbel["has the gradient of"] = _noisy(soft, key, 1.0)
    gumbel["at temperature 0.3"] = _noisy(soft, key, 0.3)
    save("gumbel", gumbel)
    local_m = partial(functional.local_m_attention, *inputs)
    save("local_m", {f"D = {d}": local_m(window=d)[1] for d in (1, 2)})
    center = jnp.asarray(MEANT) + 0.2
    local_p = partial(functional.local_p_attention, *inputs, center=center)
    save("local_p", {f"D = {d}": local_p(window=d)[1] for d in (1, 3)})
    after = jnp.eye(len(SOURCE)).at[:-1].set(jnp.eye(len(SOURCE))[1:])
    latent = functional.latent_attention(*inputs, active=after)[1]
    save("latent", {"latent": soft, "active: the next word": after, "weights": latent})
    save("plain", {"plain": functional.plain_self_attention(keys / 2)[1]}, rows=SOURCE)
    save("scores", _scores(query, keys))
    places = [str(i) if i % 4 == 0 else "" for i in range(PLACES)]
    save("positions", _positions(), places, places)


def _noisy(weights: jax.Array, key: jax.Array, temperature: float) -> jax.Array:
    """Returns the softmax with Gumbel noise, whose gradient `gumbel_attention` uses."""
    noise = jax.random.gumbel(key, weights.shape)
    return masked_softmax((jnp.log(weights) + noise) / temperature, None)


def _scores(query: jax.Array, keys: jax.Array) -> dict[str, jax.Array]:
    """Returns the weights by score function; for `location`, W is fitted to the example."""
    w = jnp.linalg.lstsq(query, 4 * jnp.eye(len(SOURCE))[jnp.asarray(MEANT)])[0]
    each_score = {
        "scaled_dot": scores.scaled_dot(query, keys),
        "dot": scores.dot(query, keys),
        "location": scores.location(query, jnp.arange(len(SOURCE)), w),
    }
    return {name: masked_softmax(each, None) for name, each in each_score.items()}


PLACES = 20


def _positions() -> dict[str, jax.Array]:
    """Returns weights by kind of positions, where all words are the same and only positions count.

    Each row is divided by its largest weight. The relative bias is learned; its panel has the
    numbers of the buckets, divided by the largest.
    """
    here = jnp.arange(PLACES)[None]
    same = rotate(jnp.ones((1, 1, PLACES, 16)), here, PLACES)[0, 0]
    distance = here - here.T
    by_kind = {
        "rotary": scores.scaled_dot(same, same),
        "ALiBi, slope 1/4": alibi(here, here, 4)[0, 0],
        "sliding window, D = 4": jnp.where(Mask(window=4).dense(PLACES, PLACES)[0, 0], 0, -1e9),
    }
    weights = {name: masked_softmax(each, None) for name, each in by_kind.items()}
    weights = {name: each / each.max(axis=-1, keepdims=True) for name, each in weights.items()}
    buckets = relative_bucket(distance, both_sides=True)
    return weights | {"relative: buckets": buckets / buckets.max()}


if __name__ == "__main__":
    draw(Path("docs"))
