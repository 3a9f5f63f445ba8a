"""The encoder-decoder Transformer of "Attention Is All You Need" in JAX and Flax.

from transformer_jax import Translator, load_config_file, train

run = train(load_config_file("configs/quickstart.py"), "runs/quickstart")
Translator.load("runs/quickstart")(["The old teacher buys a new book."])
"""

from etils import epy

with epy.lazy_api_imports(globals()):  # on first use, so that `--help` needs no JAX
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
    from transformer_jax.data.loader import Loader
    from transformer_jax.decoding.translator import Translator
    from transformer_jax.errors import UserError
    from transformer_jax.models.make import make_model
    from transformer_jax.parallel.compile import compile_step
    from transformer_jax.parallel.mesh import local_shard, make_mesh, shard_batch
    from transformer_jax.parallel.model import shard_model
    from transformer_jax.parallel.parameters import shard_tree
    from transformer_jax.training.optimizer import make_optimizer
    from transformer_jax.training.setup import check_config, load_data
    from transformer_jax.training.step import init_state, loss_fn, train_step
    from transformer_jax.training.trainer import train

__version__ = "0.1.0"

__all__ = [
    "AttentionConfig",
    "Config",
    "DataConfig",
    "DecodeConfig",
    "ExecutionConfig",
    "Loader",
    "Mask",
    "ModelConfig",
    "OptimizerConfig",
    "TokenizerConfig",
    "TrainConfig",
    "Translator",
    "UserError",
    "__version__",
    "attend",
    "check_config",
    "compile_step",
    "gumbel_attention",
    "hard_attention",
    "init_state",
    "latent_attention",
    "load_config_file",
    "load_data",
    "local_m_attention",
    "local_p_attention",
    "local_shard",
    "loss_fn",
    "make_mesh",
    "make_model",
    "make_optimizer",
    "padding_mask",
    "plain_self_attention",
    "shard_batch",
    "shard_model",
    "shard_tree",
    "soft_attention",
    "train",
    "train_step",
]
