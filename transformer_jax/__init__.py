"""The encoder-decoder Transformer of "Attention Is All You Need" in JAX and Flax.

from transformer_jax import Translator, load_config_file, train

run = train(load_config_file("configs/quickstart.py"), "runs/quickstart")
Translator.load("runs/quickstart")(["The old teacher buys a new book."])
"""

from __future__ import annotations

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

_MODULES = {
    "Translator": "decoding.translator",
    "UserError": "errors",
    "load_config_file": "config",
    "train": "training.trainer",
}
"""Modules of public names. Other names ending in "Config" are of config, the rest of attention."""


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that `--help` does not wait for JAX."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    default = "config" if name.endswith("Config") else "attention"
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, default)}"), name)
