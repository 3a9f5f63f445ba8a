"""WMT14, English to German, the paper's base model: 4.5 million pairs (docs/recipes.md).

    transformer-jax train --config=configs/wmt14_en_de_base.py --run=runs/wmt14_en_de_base \\
        --config.data.train train.en,train.de --config.data.dev dev.en,dev.de
    transformer-jax average --run=runs/wmt14_en_de_base --last 5 --out=runs/wmt14_en_de_base-average
"""

from transformer_jax.config import (
    BASE,
    Config,
    DataConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)


def get_config() -> Config:
    return Config(
        model=BASE,
        tokenizer=TokenizerConfig(vocabulary=37_000),
        data=DataConfig(train=("train.en,train.de",), dev=("dev.en,dev.de",), batch_tokens=25_000),
        optimizer=OptimizerConfig(microbatch_tokens=8192),
        train=TrainConfig(steps=100_000, evaluate_every=5000, save_every=1500, keep=5),
    )
