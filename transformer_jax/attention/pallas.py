"""The kernel `pallas`: JAX's flash attention for TPUs."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from transformer_jax.attention.functional import ContextAndWeights
from transformer_jax.attention.masks import Mask
from transformer_jax.errors import UserError
from transformer_jax.types import Heads, KVHeads, Size


def pallas(query: Heads, key: KVHeads, value: KVHeads, mask: Mask | None) -> ContextAndWeights:
    """Returns the output of JAX's flash attention, and None for the weights."""
    from jax.experimental.pallas.ops.tpu import flash_attention as tpu  # slow to import

    mask = Mask() if mask is None else mask
    batch, heads, queries, head_size = query.shape
    group = heads // key.shape[1]
    key, value = (jnp.repeat(x, group, axis=1) for x in (key, value))
    segments = tpu.SegmentIds(
        _segments(mask.query_segments, batch, queries),
        _segments(mask.key_segments, batch, key.shape[2]),
    )
    try:
        output = tpu.flash_attention(
            query, key, value, segment_ids=segments, causal=mask.causal, sm_scale=head_size**-0.5
        )
    except (NotImplementedError, ValueError) as error:  # lengths that its blocks do not divide
        raise UserError(f"kernel pallas: {error}; use xla") from error
    same = segments.q[:, :, None] == segments.kv[:, None, :]
    visible = jnp.any(same, axis=-1) & (segments.q > 0)
    return ContextAndWeights(jnp.where(visible[:, None, :, None], output, 0), None)


def _segments(segments: Int[Array, "#B L"] | None, batch: Size, length: Size) -> Int[Array, "B L"]:
    """Returns the segments with padding as -1, a segment to which only padding attends."""
    if segments is None:
        return jnp.ones((batch, length), jnp.int32)
    return jnp.broadcast_to(jnp.where(segments > 0, segments, -1), (batch, length))
