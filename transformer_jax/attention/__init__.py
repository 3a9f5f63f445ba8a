"""Attention: scores, kinds, masks, positions, kernels behind `attend`, and the multi-head layer.

The names below are those that users need.
"""

from transformer_jax.attention.functional import gumbel_attention as gumbel_attention
from transformer_jax.attention.functional import hard_attention as hard_attention
from transformer_jax.attention.functional import latent_attention as latent_attention
from transformer_jax.attention.functional import local_m_attention as local_m_attention
from transformer_jax.attention.functional import local_p_attention as local_p_attention
from transformer_jax.attention.functional import plain_self_attention as plain_self_attention
from transformer_jax.attention.functional import predicted_center as predicted_center
from transformer_jax.attention.functional import soft_attention as soft_attention
from transformer_jax.attention.kernels import attend as attend
from transformer_jax.attention.kinds import AttentionInputs as AttentionInputs
from transformer_jax.attention.kinds import AttentionOutput as AttentionOutput
from transformer_jax.attention.kinds import register_kind as register_kind
from transformer_jax.attention.masks import Mask as Mask
from transformer_jax.attention.masks import padding_mask as padding_mask
from transformer_jax.attention.multi_head import Context as Context
from transformer_jax.attention.positions import alibi as alibi
