"""IWSLT14, German to English: 160,000 pairs of TED talks, with fairseq's recipe (docs/recipes.md).

    transformer-jax train --config=configs/iwslt14_de_en.py --run=runs/iwslt14 \\
        --config.data.train train.de,train.en --config.data.dev valid.de,valid.en
    transformer-jax average --run=runs/iwslt14 --last 5 --out=runs/iwslt14-average
"""

from dataclasses import replace

from transformer_jax.config import (
    BASE,
    Config,
    DataConfig,
    DecodeConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)


def get_config() -> Config:
    return Config(
        model=replace(BASE, heads=4, d_ff=1024, dropout=0.3),
        tokenizer=TokenizerConfig(vocabulary=10_000),
        data=DataConfig(train=("train.de,train.en",), dev=("valid.de,valid.en",)),
        optimizer=OptimizerConfig(
            schedule="inverse_sqrt",
            learning_rate=5e-4,
            eps=1e-8,
            weight_decay=1e-4,
            microbatch_tokens=4096,
        ),
        train=TrainConfig(steps=50_000, evaluate_every=1000, save_every=1000, keep=5),
        decode=DecodeConfig(beam=5, penalty="power", alpha=1.0),
    )
