"""Declares what an attention kernel supports. The table of all kernels is `kernels.KERNELS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Array

FEATURES = {
    "bias": "a bias",
    "dropout": "dropout",
    "weights": "attention weights",
    "window": "windows",
    "dense_mask": "dense masks",
    "unaligned_causal": "causal masks whose positions differ from the indices",
}
"""Features that a call may need of a kernel, each with its name in error messages."""

EVERY_MASK = frozenset({"window", "dense_mask", "unaligned_causal"})


@dataclass(frozen=True)
class KernelEntry:
    """A kernel: its name in the config, its function and what it supports.

    `function` is called with query, key, value and mask, and with the keywords `bias` and `dropout`
    if the kernel has these features. It returns the output and the attention weights, or None for
    the weights if it does not have that feature.
    """

    name: str
    function: Callable[..., tuple[Array, Array | None]]
    features: frozenset[str]
    dtypes: tuple[str, ...] = ()
    """Supported types of the query; empty: all."""
    platforms: tuple[str, ...] = ()
    """JAX platforms that it runs on; empty: all."""

    def __post_init__(self) -> None:
        assert self.features <= set(FEATURES), self.features
