"""The encoder-decoder Transformer of "Attention Is All You Need" in JAX and Flax.

from transformer_jax import Translator, load_config_file, train

run = train(load_config_file("configs/quickstart.py"), "runs/quickstart")
Translator.load("runs/quickstart")(["The old teacher buys a new book."])
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):  # on first use, so that `--help` needs no JAX
    from transformer_jax.attention import Mask as Mask
    from transformer_jax.attention import attend as attend
    from transformer_jax.attention import gumbel_attention as gumbel_attention
    from transformer_jax.attention import hard_attention as hard_attention
    from transformer_jax.attention import latent_attention as latent_attention
    from transformer_jax.attention import local_m_attention as local_m_attention
    from transformer_jax.attention import local_p_attention as local_p_attention
    from transformer_jax.attention import padding_mask as padding_mask
    from transformer_jax.attention import plain_self_attention as plain_self_attention
    from transformer_jax.attention import soft_attention as soft_attention
    from transformer_jax.config import AttentionConfig as AttentionConfig
    from transformer_jax.config import Config as Config
    from transformer_jax.config import DataConfig as DataConfig
    from transformer_jax.config import DecodeConfig as DecodeConfig
    from transformer_jax.config import ExecutionConfig as ExecutionConfig
    from transformer_jax.config import ModelConfig as ModelConfig
    from transformer_jax.config import OptimizerConfig as OptimizerConfig
    from transformer_jax.config import TokenizerConfig as TokenizerConfig
    from transformer_jax.config import TrainConfig as TrainConfig
    from transformer_jax.config import load_config_file as load_config_file
    from transformer_jax.data.loader import Loader as Loader
    from transformer_jax.decoding.translator import Translator as Translator
    from transformer_jax.errors import UserError as UserError
    from transformer_jax.models.make import make_model as make_model
    from transformer_jax.parallel.compile import compile_step as compile_step
    from transformer_jax.parallel.mesh import local_shard as local_shard
    from transformer_jax.parallel.mesh import make_mesh as make_mesh
    from transformer_jax.parallel.mesh import shard_batch as shard_batch
    from transformer_jax.parallel.model import shard_model as shard_model
    from transformer_jax.parallel.parameters import shard_tree as shard_tree
    from transformer_jax.training.optimizer import make_optimizer as make_optimizer
    from transformer_jax.training.setup import check_config as check_config
    from transformer_jax.training.setup import load_data as load_data
    from transformer_jax.training.step import init_state as init_state
    from transformer_jax.training.step import loss_fn as loss_fn
    from transformer_jax.training.step import train_step as train_step
    from transformer_jax.training.trainer import train as train

__version__ = "0.1.0"
