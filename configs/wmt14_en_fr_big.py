"""WMT14, English to French, the paper's big model: 36 million pairs (docs/recipes.md).

    transformer-jax train --config=configs/wmt14_en_fr_big.py --run=runs/wmt14_en_fr_big \\
        --config.data.train train.en,train.fr --config.data.dev dev.en,dev.fr
    transformer-jax average --run=runs/wmt14_en_fr_big --last 20 --out=runs/wmt14_en_fr_big-average
"""

from dataclasses import replace

from transformer_jax.config import (
    BIG,
    Config,
    DataConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)


def get_config() -> Config:
    return Config(
        model=replace(BIG, dropout=0.1),
        tokenizer=TokenizerConfig(vocabulary=32_000),
        data=DataConfig(train=("train.en,train.fr",), dev=("dev.en,dev.fr",), batch_tokens=25_000),
        optimizer=OptimizerConfig(microbatch_tokens=8192),
        train=TrainConfig(steps=300_000, evaluate_every=5000, save_every=600, keep=20),
    )
