"""Attention: scores, kinds, masks, positions, kernels behind `attend`, and the multi-head layer."""

from transformer_jax.attention.functional import (
    gumbel_attention,
    hard_attention,
    latent_attention,
    local_m_attention,
    local_p_attention,
    plain_self_attention,
    predicted_center,
    soft_attention,
)
from transformer_jax.attention.kernels import AnyKernel, attend
from transformer_jax.attention.kinds import AttentionInputs, AttentionOutput, register_kind
from transformer_jax.attention.masks import Mask, padding_mask
from transformer_jax.attention.multi_head import Context, KeysValues, KVCache, MultiHeadAttention
from transformer_jax.attention.positions import RelativeBias, alibi

__all__ = [
    "AnyKernel",
    "AttentionInputs",
    "AttentionOutput",
    "Context",
    "KVCache",
    "KeysValues",
    "Mask",
    "MultiHeadAttention",
    "RelativeBias",
    "alibi",
    "attend",
    "gumbel_attention",
    "hard_attention",
    "latent_attention",
    "local_m_attention",
    "local_p_attention",
    "padding_mask",
    "plain_self_attention",
    "predicted_center",
    "register_kind",
    "soft_attention",
]
