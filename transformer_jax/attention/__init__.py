"""Attention: scores, kinds, masks, positions, kernels behind `attend`, and the multi-head layer.

The names below are those that users need.
"""

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
from transformer_jax.attention.kernels import attend
from transformer_jax.attention.kinds import AttentionInputs, AttentionOutput, register_kind
from transformer_jax.attention.masks import Mask, padding_mask
from transformer_jax.attention.multi_head import Context
from transformer_jax.attention.positions import alibi

__all__ = [
    "AttentionInputs",
    "AttentionOutput",
    "Context",
    "Mask",
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
