"""WMT14, English to German, the paper's big model: 4.5 million pairs (docs/recipes.md).

    transformer-jax train --config=configs/wmt14_en_de_big.py --run=runs/wmt14_en_de_big \\
        --config.data.train train.en,train.de --config.data.dev dev.en,dev.de
    transformer-jax average --run=runs/wmt14_en_de_big --last 20 --out=runs/wmt14_en_de_big-average
"""

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
        model=BIG,
        tokenizer=TokenizerConfig(vocabulary=37_000),
        data=DataConfig(train=("train.en,train.de",), dev=("dev.en,dev.de",), batch_tokens=25_000),
        optimizer=OptimizerConfig(microbatch_tokens=8192),
        train=TrainConfig(steps=300_000, evaluate_every=5000, save_every=600, keep=20),
    )
