"""The encoder-decoder Transformer of "Attention Is All You Need" in JAX and Flax.

from transformer_jax import Translator, load_config_file, train

run = train(load_config_file("configs/quickstart.py"), "runs/quickstart")
Translator.load("runs/quickstart")(["The old teacher buys a new book."])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer_jax.attention import (
        Mask,
        attend,
        gumbel_attention,
        hard_attention,
        latent_attention,
        local_m_attention,
        local_p_attention,
        padding_mask,
        plain_self_attention,
        soft_attention,
    )
    from transformer_jax.config import (
        AttentionConfig,
        Config,
        DataConfig,
        DecodeConfig,
        ExecutionConfig,
        ModelConfig,
        OptimizerConfig,
        TokenizerConfig,
        TrainConfig,
        load_config_file,
    )
    from transformer_jax.decoding.translator import Translator
    from transformer_jax.errors import UserError
    from transformer_jax.training.trainer import train

__version__ = "0.1.0"

__all__ = [
    "AttentionConfig",
    "Config",
    "DataConfig",
    "DecodeConfig",
    "ExecutionConfig",
    "Mask",
    "ModelConfig",
    "OptimizerConfig",
    "TokenizerConfig",
    "TrainConfig",
    "Translator",
    "UserError",
    "__version__",
    "attend",
    "gumbel_attention",
    "hard_attention",
    "latent_attention",
    "load_config_file",
    "local_m_attention",
    "local_p_attention",
    "padding_mask",
    "plain_self_attention",
    "soft_attention",
    "train",
]

_MODULE_OF = {
    "AttentionConfig": "config",
    "Config": "config",
    "DataConfig": "config",
    "DecodeConfig": "config",
    "ExecutionConfig": "config",
    "Mask": "attention",
    "ModelConfig": "config",
    "OptimizerConfig": "config",
    "TokenizerConfig": "config",
    "TrainConfig": "config",
    "Translator": "decoding.translator",
    "UserError": "errors",
    "attend": "attention",
    "gumbel_attention": "attention",
    "hard_attention": "attention",
    "latent_attention": "attention",
    "load_config_file": "config",
    "local_m_attention": "attention",
    "local_p_attention": "attention",
    "padding_mask": "attention",
    "plain_self_attention": "attention",
    "soft_attention": "attention",
    "train": "training.trainer",
}
"""The modules of public names. They are imported on first use, so that `--help` needs no JAX."""


def __getattr__(name: str) -> Any:
    """Imports a public name."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
