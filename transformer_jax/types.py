"""Names shared by every room: the dimension legend, `Params`, `Key` and `Batch`.

Dimensions, in capitals in shapes and in lower case in einsum strings:

    B batch    S source length    T target length    D d_model    N heads    H head size
    F d_ff     V vocabulary       K beams            L layers
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

Params = dict[str, Any]
"""The tree of parameters that `Module.init` returns under "params"."""

Key = jax.Array
"""A typed PRNG key (`jax.random.key`)."""

Size = Any
"""A number of elements: an int, or a symbolic dimension of `jax.export`."""

HostOrDeviceArray = Any
"""A NumPy array on the host or a `jax.Array` on devices (the same batch is both in its life)."""


class DecodeState(NamedTuple):
    """What decoding carries from step to step."""

    memory: Any  # of the sentences, the same at every step; leaves [B, ...]
    beams: Any  # of the hypotheses, reordered by a beam search; leaves [B, K, ...]


class Batch(NamedTuple):
    """Pairs of sentences as ids; 0 is padding everywhere.

    `target_in` is `target_out` moved right by one, behind the decoder's start id. Where several
    pairs are packed into one row, `*_segments` number them from 1 (0: padding) and `*_positions`
    restart at each of them; where they are None, a row is one pair.
    """

    source: HostOrDeviceArray  # [B, S] int32
    target_in: HostOrDeviceArray  # [B, T] int32
    target_out: HostOrDeviceArray  # [B, T] int32
    source_segments: HostOrDeviceArray | None = None  # [B, S] int32
    source_positions: HostOrDeviceArray | None = None  # [B, S] int32
    target_segments: HostOrDeviceArray | None = None  # [B, T] int32
    target_positions: HostOrDeviceArray | None = None  # [B, T] int32
