"""Attention: masks, kernels behind `attend`, and the multi-head layer."""

from transformer_jax.attention.kernels import Kernel, attend, reference
from transformer_jax.attention.masks import causal_mask, padding_mask, segment_mask
from transformer_jax.attention.multi_head import KVCache, MultiHeadAttention

__all__ = [
    "KVCache",
    "Kernel",
    "MultiHeadAttention",
    "attend",
    "causal_mask",
    "padding_mask",
    "reference",
    "segment_mask",
]
