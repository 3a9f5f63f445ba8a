"""The paper's base model and recipe (sections 5.2 to 5.4), for corpora of millions of pairs.

Name the files on the command line. Training uses all accelerators of the machine. As in the paper,
a batch has about 25,000 target tokens:

    transformer-jax train --config=configs/base.py --run=runs/base \\
        --config.data.train train.en,train.de --config.data.dev dev.en,dev.de
"""

from transformer_jax.config import BASE, Config, DataConfig, TokenizerConfig, TrainConfig


def get_config() -> Config:
    return Config(
        model=BASE,
        tokenizer=TokenizerConfig(vocabulary=37_000),
        data=DataConfig(train=("train.en,train.de",), dev=("dev.en,dev.de",), batch_tokens=25_000),
        train=TrainConfig(steps=100_000, evaluate_every=2000, save_every=1000, keep=5),
    )
