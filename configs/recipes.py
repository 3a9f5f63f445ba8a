"""Latent attention as a sentence-to-label model on the built-in recipes: seconds on two CPU cores.

The baseline is ordinary attention pooling over the same embeddings:

    transformer-jax train --config=configs/recipes.py --run=runs/baseline \\
        --config.model.cross-attention.kind=soft
"""

from transformer_jax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)

STEPS = 1000


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            labels=2,
            layers=0,
            d_model=64,
            heads=2,
            max_length=32,
            positions="learned",
            tied="none",
            dropout=0.0,
            cross_attention=AttentionConfig(kind="latent"),
        ),
        tokenizer=TokenizerConfig(kind="word", joint=False),
        data=DataConfig(train=("recipes",), dev=("recipes",), batch_tokens=2048, shapes=1),
        optimizer=OptimizerConfig(
            schedule="linear",
            learning_rate=0.003,
            warmup=50,
            decay_steps=STEPS,
            label_smoothing=0.0,
        ),
        train=TrainConfig(steps=STEPS, best="loss", save_every=STEPS, log_every=100),
        decode=DecodeConfig(beam=1),
    )
